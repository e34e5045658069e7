// The address space of the emulated devices: reservations, mappings and access, kept both in tables and in real page
// protections, so that touching what a GPU could not touch faults.
//
//   reserved, unmapped                     anonymous, PROT_NONE
//   mapped, no device has access           shared file pages, PROT_NONE
//   mapped, some device has access         shared file pages, readable and writable
//
// Invariants: mappings do not overlap, each lies in one reservation, each keeps its pages alive; addresses and sizes
// are multiples of the granularity. access(mapping) == 0 <=> its pages are PROT_NONE.
//
// Threads: not locked; the owner does. After an error nothing has changed. The destructor gives all addresses back.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "../status.h"
#include "../types.h"
#include "host_pages.h"

namespace cumem {

using DeviceMask = std::uint64_t;  // bit i: device i
inline constexpr int kMaxHostDevices = 64;
constexpr DeviceMask mask_of(Device device) { return DeviceMask{1} << device.ordinal; }

// "[0x7f..., +2097152)", for messages.
[[nodiscard]] std::string range_text(DeviceAddress address, std::uint64_t size);

class HostAddressSpace {
 public:
  explicit HostAddressSpace(std::uint64_t granularity_bytes) : granularity_(granularity_bytes) {}
  HostAddressSpace(const HostAddressSpace&) = delete;
  HostAddressSpace& operator=(const HostAddressSpace&) = delete;
  ~HostAddressSpace();

  // kOutOfDeviceMemory when the address space has no such range, as libcuda says it.
  Result<DeviceAddress> reserve(std::uint64_t size);
  Status address_free(DeviceAddress address, std::uint64_t size);
  Status map(DeviceAddress address, std::uint64_t size, std::shared_ptr<HostPages> pages, Device owner);
  Status set_access(DeviceAddress address, std::uint64_t size, DeviceMask devices);
  Status unmap(DeviceAddress address, std::uint64_t size);

  [[nodiscard]] std::uint64_t range_count() const { return ranges_.size(); }
  [[nodiscard]] std::uint64_t mapping_count() const { return mappings_.size(); }
  // A size or address that create, reserve, map, set_access and unmap take.
  [[nodiscard]] bool is_aligned(std::uint64_t size) const { return size > 0 && size % granularity_ == 0; }
  // Whether `device` may touch every byte of [address, address + size).
  [[nodiscard]] bool accessible(DeviceAddress address, std::uint64_t size, Device device) const;
  // Devices whose pages are mapped somewhere in the range.
  [[nodiscard]] DeviceMask owners(DeviceAddress address, std::uint64_t size) const;
  [[nodiscard]] std::optional<Device> owner_at(DeviceAddress address) const;
  [[nodiscard]] bool touches_reservation(std::uint64_t begin, std::uint64_t size) const;

 private:
  struct Mapping {
    std::uint64_t size;
    std::shared_ptr<HostPages> pages;
    Device owner;
    DeviceMask access;
  };
  using Mappings = std::map<std::uint64_t, Mapping>;  // by address

  Status check_range(const char* call, DeviceAddress address, std::uint64_t size) const;
  [[nodiscard]] bool in_one_reservation(std::uint64_t begin, std::uint64_t size) const;
  [[nodiscard]] bool has_mapping_in(std::uint64_t begin, std::uint64_t size) const;
  // First and past-the-last mapping when the range consists of whole mappings.
  Result<std::pair<Mappings::iterator, Mappings::iterator>> whole_mappings(const char* call, DeviceAddress address,
                                                                           std::uint64_t size);
  [[nodiscard]] Mappings::const_iterator containing(std::uint64_t address) const;

  const std::uint64_t granularity_;
  std::map<std::uint64_t, std::uint64_t> ranges_;  // address -> size
  Mappings mappings_;
};

}  // namespace cumem
