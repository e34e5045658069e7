#include "host_registrations.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <string>

namespace cumem {
namespace {

Status refused(const char* call, const char* why) { return Status(Code::kInvalidValue, call, why); }

// Whether the process has memory at every page of the range.
bool is_mapped(std::uint64_t begin, std::uint64_t end) {
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  std::array<unsigned char, 4096> resident;
  const std::uint64_t step = resident.size() * page;
  for (std::uint64_t at = begin / page * page; at < end; at += step) {
    const std::uint64_t length = std::min(step, end - at);
    if (mincore(reinterpret_cast<void*>(at), length, resident.data()) != 0) return false;
  }
  return true;
}

}  // namespace

Status HostRegistrations::add(const void* host, std::uint64_t size) {
  const auto begin = reinterpret_cast<std::uintptr_t>(host);
  if (begin == 0 || size == 0 || size > std::numeric_limits<std::uint64_t>::max() - begin) {
    return refused("register_host", "the range is empty or wraps around");
  }
  const auto inside = find("register_host", host, size);
  if (!inside.ok() || inside.value() != 0) return refused("register_host", "part of the range is registered already");
  if (!is_mapped(begin, begin + size)) return refused("register_host", "part of the range is no memory");
  by_address_.emplace(begin, Registration{size, ++last_id_});
  return {};
}

Status HostRegistrations::remove(const void* host) {
  if (by_address_.erase(reinterpret_cast<std::uintptr_t>(host)) == 0) {
    return refused("unregister_host", "no registration begins there");
  }
  return {};
}

Result<std::uint64_t> HostRegistrations::find(const char* call, const void* host, std::uint64_t size) const {
  const auto begin = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(host));
  const std::uint64_t end = begin + size;
  const auto after = by_address_.lower_bound(end);
  if (after == by_address_.begin()) return std::uint64_t{0};
  const auto& [first, registration] = *std::prev(after);
  if (first + registration.size <= begin) return std::uint64_t{0};
  if (first <= begin && end <= first + registration.size) return registration.id;
  return refused(call, "the host range crosses the border of a registration");
}

}  // namespace cumem
