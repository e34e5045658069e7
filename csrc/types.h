// Strong types and byte helpers. An address, a handle, a device and a segment id never convert into each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>

namespace cumem {

inline constexpr std::uint64_t kKiB = 1024;
inline constexpr std::uint64_t kMiB = 1024 * kKiB;
inline constexpr std::uint64_t kGiB = 1024 * kMiB;

// A 64-bit integer made distinct by its tag. Ordered, hashable, explicit in both directions.
template <typename Tag>
struct Id {
  std::uint64_t value = 0;

  constexpr Id() = default;
  constexpr explicit Id(std::uint64_t v) : value(v) {}
  friend constexpr bool operator==(Id a, Id b) { return a.value == b.value; }
  friend constexpr bool operator!=(Id a, Id b) { return a.value != b.value; }
  friend constexpr bool operator<(Id a, Id b) { return a.value < b.value; }
};

using DeviceAddress = Id<struct DeviceAddressTag>;    // a device virtual address
using PhysicalHandle = Id<struct PhysicalHandleTag>;  // a driver's handle of physical memory
using StreamHandle = Id<struct StreamHandleTag>;      // a driver's stream
using EventHandle = Id<struct EventHandleTag>;        // a driver's event
using SegmentId = Id<struct SegmentIdTag>;            // never reused within a process
using SlotId = Id<struct SlotIdTag>;                  // one (allocator, tag); C++ does not know the tag

inline DeviceAddress operator+(DeviceAddress a, std::uint64_t bytes) { return DeviceAddress(a.value + bytes); }

struct Device {
  int ordinal = 0;
  friend constexpr bool operator==(Device a, Device b) { return a.ordinal == b.ordinal; }
  friend constexpr bool operator!=(Device a, Device b) { return a.ordinal != b.ordinal; }
  friend constexpr bool operator<(Device a, Device b) { return a.ordinal < b.ordinal; }
};

// `value` rounded up to a multiple of `multiple` (> 0), or nothing if that overflows 64 bits.
[[nodiscard]] constexpr std::optional<std::uint64_t> round_up(std::uint64_t value, std::uint64_t multiple) {
  const std::uint64_t rest = value % multiple;
  if (rest == 0) return value;
  const std::uint64_t add = multiple - rest;
  if (value > std::numeric_limits<std::uint64_t>::max() - add) return std::nullopt;
  return value + add;
}

}  // namespace cumem

template <typename Tag>
struct std::hash<cumem::Id<Tag>> {
  std::size_t operator()(cumem::Id<Tag> id) const noexcept { return std::hash<std::uint64_t>{}(id.value); }
};
