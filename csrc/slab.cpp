// Slab: mapping, populating, registering.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

#include "host_arena.h"
#include "parallel.h"
#include "process.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace cumem {
namespace {

constexpr std::uint64_t kStepBytes = 64 * kMiB;

// False: the system has no pages to give.
bool touch(std::byte* data, std::uint64_t size) {
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  for (std::uint64_t at = 0; at < size; at += page) reinterpret_cast<volatile std::byte*>(data)[at] = std::byte{0};
  return true;
}

bool populate_step(std::byte* data, std::uint64_t size) {
  while (madvise(data, size, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == EINVAL) return touch(data, size);  // kernels before 5.14
    return false;
  }
  return true;
}

bool populate(std::byte* data, std::uint64_t size, unsigned threads) {
  std::atomic<bool> populated{true};
  for_each_index(threads, static_cast<std::size_t>((size + kStepBytes - 1) / kStepBytes), [&](std::size_t step) {
    const std::uint64_t at = step * kStepBytes;
    if (populated && !populate_step(data + at, std::min(kStepBytes, size - at))) populated = false;
  });
  return populated;
}

}  // namespace

Slab::Slab(std::shared_ptr<Driver> driver, std::byte* data, std::uint64_t size)
    : driver_(std::move(driver)), data_(data), size_(size) {}

Result<std::shared_ptr<Slab>> Slab::create(std::shared_ptr<Driver> driver, std::uint64_t size, unsigned threads) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return Status::out_of_host_memory("mmap", size, 0, "the system maps no more memory");
  std::shared_ptr<Slab> slab(new Slab(std::move(driver), static_cast<std::byte*>(data), size));
  (void)madvise(data, size, MADV_HUGEPAGE);  // advice: a kernel without it is slower, not wrong
  (void)madvise(data, size, MADV_DONTFORK);  // a child needs no backups, and copy-on-write would move pinned pages
  if (!populate(slab->data_, size, threads)) {
    return Status::out_of_host_memory("madvise", size, 0, "the system has no pages left");
  }
  const Status status = slab->driver_->register_host(data, size);
  if (status.code() == Code::kContextBroken) return status;
  slab->pinned_ = status.ok();
  return slab;
}

Status Slab::unpin() {
  if (pinned_) CUMEM_RETURN_IF_ERROR(driver_->unregister_host(data_));
  pinned_ = false;
  return {};
}

Slab::~Slab() {
  if (!may_call_driver()) return;  // a forked child has no such mapping; an exiting process leaves it to its end
  if (!unpin().ok()) return;       // a leak, never a dangling page
  munmap(data_, size_);
}

}  // namespace cumem
