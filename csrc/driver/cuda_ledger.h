// CudaLedger: what a CudaDriver has made and not yet taken back, and with it the laws of memory that libcuda leaves to
// its callers: a handle that never was may crash it, it maps a part of a handle, and it unmaps across holes.
//
// Invariants: mappings do not overlap, and each lies in one range. counts(): one handle for each create and import.
//
// What libcuda gives back it may give out again at once, to another thread: take from the ledger first, then call
// libcuda, and on its refusal put back what was taken. Refusals here are kInvalidValue, and nothing has changed.
//
// Threads: any; one mutex, for bookkeeping only.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

#include "driver.h"

namespace cumem {

class CudaLedger {
 public:
  using Mappings = std::map<std::uint64_t, std::uint64_t>;  // address -> size
  struct Handle {
    std::uint64_t size = 0;
    bool exportable = false;
  };

  void add_range(DeviceAddress address, std::uint64_t size);
  // Exactly what was added, and nothing is mapped in it.
  Status take_range(DeviceAddress address, std::uint64_t size);

  // An import may give a handle that exists: each addition is taken by itself.
  void add_handle(PhysicalHandle handle, const Handle& what);
  Result<Handle> take_handle(PhysicalHandle handle);
  Status check_exportable(PhysicalHandle handle) const;

  // All of a living handle, into free addresses of one range.
  Status add_mapping(DeviceAddress address, std::uint64_t size, PhysicalHandle handle);
  // The mappings that the range consists of, whole and without a hole.
  Result<Mappings> take_mappings(DeviceAddress address, std::uint64_t size);
  void put_back(const Mappings& mappings);
  Status check_mapped(DeviceAddress address, std::uint64_t size) const;

  // handles, ranges, mappings and physical bytes; the rest is 0.
  [[nodiscard]] DriverCounts counts() const;

 private:
  [[nodiscard]] bool in_one_range(std::uint64_t begin, std::uint64_t size) const;
  [[nodiscard]] bool has_mapping_in(std::uint64_t begin, std::uint64_t size) const;
  Result<Mappings> whole_mappings(const char* call, DeviceAddress address, std::uint64_t size) const;

  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> ranges_;  // address -> size
  Mappings mappings_;
  std::unordered_multimap<PhysicalHandle, Handle> handles_;
};

}  // namespace cumem
