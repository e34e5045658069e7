#include "host_address_space.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <iterator>
#include <limits>
#include <string>

namespace cumem {
namespace {

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

std::uint64_t address_of(void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

Status refused(const char* call, DeviceAddress address, std::uint64_t size, const char* why) {
  return Status(Code::kInvalidValue, call, range_text(address, size) + ": " + why);
}

Status system_error(const char* call, const char* what) {
  const int error = errno;
  return Status(Code::kDriver, call, std::string(what) + " failed, errno " + std::to_string(error), error);
}

}  // namespace

std::string range_text(DeviceAddress address, std::uint64_t size) {
  char text[64];
  std::snprintf(text, sizeof(text), "[0x%llx, +%llu)", static_cast<unsigned long long>(address.value),
                static_cast<unsigned long long>(size));
  return text;
}

HostAddressSpace::~HostAddressSpace() {
  for (const auto& [address, size] : ranges_) munmap(pointer(address), size);
}

// --- questions ---

// Sizes and addresses that no call takes: empty, unaligned, past the end of the address space.
Status HostAddressSpace::check_range(const char* call, DeviceAddress address, std::uint64_t size) const {
  if (!is_aligned(size)) return refused(call, address, size, "the size is no positive multiple of the granularity");
  if (address.value % granularity_ != 0) return refused(call, address, size, "the address is not aligned");
  if (address.value > std::numeric_limits<std::uint64_t>::max() - size) {
    return refused(call, address, size, "the range ends past the address space");
  }
  return {};
}

bool HostAddressSpace::in_one_reservation(std::uint64_t begin, std::uint64_t size) const {
  const auto after = ranges_.upper_bound(begin);
  if (after == ranges_.begin()) return false;
  const auto range = std::prev(after);
  return begin + size <= range->first + range->second;
}

bool HostAddressSpace::touches_reservation(std::uint64_t begin, std::uint64_t size) const {
  const auto after = ranges_.lower_bound(begin + size);
  if (after == ranges_.begin()) return false;
  const auto range = std::prev(after);
  return range->first + range->second > begin;
}

bool HostAddressSpace::has_mapping_in(std::uint64_t begin, std::uint64_t size) const {
  const auto after = mappings_.lower_bound(begin + size);
  if (after == mappings_.begin()) return false;
  const auto mapping = std::prev(after);
  return mapping->first + mapping->second.size > begin;
}

HostAddressSpace::Mappings::const_iterator HostAddressSpace::containing(std::uint64_t address) const {
  const auto after = mappings_.upper_bound(address);
  if (after == mappings_.begin()) return mappings_.end();
  const auto mapping = std::prev(after);
  return address < mapping->first + mapping->second.size ? mapping : mappings_.end();
}

bool HostAddressSpace::accessible(DeviceAddress address, std::uint64_t size, Device device) const {
  const std::uint64_t end = address.value + size;
  for (std::uint64_t at = address.value; at < end;) {
    const auto mapping = containing(at);
    if (mapping == mappings_.end() || (mapping->second.access & mask_of(device)) == 0) return false;
    at = mapping->first + mapping->second.size;
  }
  return true;
}

DeviceMask HostAddressSpace::owners(DeviceAddress address, std::uint64_t size) const {
  DeviceMask found = 0;
  for (auto mapping = mappings_.lower_bound(address.value);
       mapping != mappings_.end() && mapping->first - address.value < size; ++mapping) {
    found |= mask_of(mapping->second.owner);
  }
  return found;
}

std::optional<Device> HostAddressSpace::owner_at(DeviceAddress address) const {
  const auto mapping = containing(address.value);
  if (mapping == mappings_.end()) return std::nullopt;
  return mapping->second.owner;
}

Result<std::pair<HostAddressSpace::Mappings::iterator, HostAddressSpace::Mappings::iterator>>
HostAddressSpace::whole_mappings(const char* call, DeviceAddress address, std::uint64_t size) {
  CUMEM_RETURN_IF_ERROR(check_range(call, address, size));
  const std::uint64_t end = address.value + size;
  const auto first = mappings_.find(address.value);
  auto last = first;
  std::uint64_t at = address.value;
  while (at < end && last != mappings_.end() && last->first == at) {
    at += last->second.size;
    ++last;
  }
  if (at != end) return refused(call, address, size, "it does not consist of whole mappings");
  return std::make_pair(first, last);
}

// --- changes ---

Result<DeviceAddress> HostAddressSpace::reserve(std::uint64_t size) {
  if (!is_aligned(size)) return refused("reserve", {}, size, "the size is no positive multiple of the granularity");
  if (size > std::numeric_limits<std::uint64_t>::max() - granularity_) {
    return Status::out_of_device_memory("reserve", size, 0, ENOMEM);
  }
  // One granularity too much, then both ends trimmed: mmap aligns to pages only.
  void* raw = mmap(nullptr, size + granularity_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return Status::out_of_device_memory("reserve", size, 0, errno);
  const std::uint64_t begin = address_of(raw);
  const std::uint64_t aligned = (begin + granularity_ - 1) / granularity_ * granularity_;
  if (aligned != begin) munmap(raw, aligned - begin);
  const std::uint64_t tail = begin + granularity_ - aligned;
  if (tail != 0) munmap(pointer(aligned + size), tail);
  ranges_.emplace(aligned, size);
  return DeviceAddress(aligned);
}

Status HostAddressSpace::address_free(DeviceAddress address, std::uint64_t size) {
  const auto range = ranges_.find(address.value);
  if (range == ranges_.end() || range->second != size) {
    return refused("address_free", address, size, "it is not what reserve gave");
  }
  if (has_mapping_in(address.value, size)) return refused("address_free", address, size, "something is mapped in it");
  if (munmap(pointer(address.value), size) != 0) return system_error("address_free", "munmap");
  ranges_.erase(range);
  return {};
}

Status HostAddressSpace::map(DeviceAddress address, std::uint64_t size, std::shared_ptr<HostPages> pages,
                             Device owner) {
  CUMEM_RETURN_IF_ERROR(check_range("map", address, size));
  if (size != pages->size()) return refused("map", address, size, "the handle has another size");
  if (!in_one_reservation(address.value, size)) return refused("map", address, size, "it lies in no one reservation");
  if (has_mapping_in(address.value, size)) return refused("map", address, size, "something is mapped in it");
  if (mmap(pointer(address.value), size, PROT_NONE, MAP_SHARED | MAP_FIXED, pages->fd(),
           static_cast<off_t>(pages->offset())) == MAP_FAILED) {
    return system_error("map", "mmap");
  }
  mappings_.emplace(address.value, Mapping{size, std::move(pages), owner, 0});
  return {};
}

Status HostAddressSpace::set_access(DeviceAddress address, std::uint64_t size, DeviceMask devices) {
  if (devices == 0) return refused("set_access", address, size, "no device is named");
  auto whole = whole_mappings("set_access", address, size);
  if (!whole.ok()) return whole.status();
  const auto [first, last] = whole.value();
  if (mprotect(pointer(address.value), size, PROT_READ | PROT_WRITE) != 0) {
    const Status failure = system_error("set_access", "mprotect");
    for (auto mapping = first; mapping != last; ++mapping) {  // it may have changed a part
      if (mapping->second.access == 0) mprotect(pointer(mapping->first), mapping->second.size, PROT_NONE);
    }
    return failure;
  }
  for (auto mapping = first; mapping != last; ++mapping) mapping->second.access |= devices;
  return {};
}

Status HostAddressSpace::unmap(DeviceAddress address, std::uint64_t size) {
  auto whole = whole_mappings("unmap", address, size);
  if (!whole.ok()) return whole.status();
  if (mmap(pointer(address.value), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
      MAP_FAILED) {
    return system_error("unmap", "mmap");
  }
  mappings_.erase(whole.value().first, whole.value().second);
  return {};
}

}  // namespace cumem
