#include "cuda_ledger.h"

#include <iterator>
#include <limits>
#include <utility>

namespace cumem {
namespace {

using Lock = std::lock_guard<std::mutex>;

constexpr std::int64_t kInvalidValue = 1;  // CUDA_ERROR_INVALID_VALUE: what libcuda would say, if it looked

Status refused(const char* call, const char* why) { return Status(Code::kInvalidValue, call, why, kInvalidValue); }

bool wraps_around(DeviceAddress address, std::uint64_t size) {
  return size > std::numeric_limits<std::uint64_t>::max() - address.value;
}

}  // namespace

// --- ranges ---

void CudaLedger::add_range(DeviceAddress address, std::uint64_t size) {
  const Lock lock(mutex_);
  ranges_.emplace(address.value, size);
}

Status CudaLedger::take_range(DeviceAddress address, std::uint64_t size) {
  const Lock lock(mutex_);
  const auto range = ranges_.find(address.value);
  if (range == ranges_.end() || range->second != size)
    return refused("cuMemAddressFree", "it is not what reserve gave");
  if (has_mapping_in(address.value, size)) return refused("cuMemAddressFree", "something is mapped in it");
  ranges_.erase(range);
  return {};
}

bool CudaLedger::in_one_range(std::uint64_t begin, std::uint64_t size) const {
  const auto after = ranges_.upper_bound(begin);
  if (after == ranges_.begin()) return false;
  const auto range = std::prev(after);
  return begin + size <= range->first + range->second;
}

// --- handles ---

void CudaLedger::add_handle(PhysicalHandle handle, const Handle& what) {
  const Lock lock(mutex_);
  handles_.emplace(handle, what);
}

Result<CudaLedger::Handle> CudaLedger::take_handle(PhysicalHandle handle) {
  const Lock lock(mutex_);
  const auto found = handles_.find(handle);
  if (found == handles_.end()) return refused("cuMemRelease", "no such handle");
  const Handle taken = found->second;
  handles_.erase(found);
  return taken;
}

Status CudaLedger::check_exportable(PhysicalHandle handle) const {
  const Lock lock(mutex_);
  const auto found = handles_.find(handle);
  if (found != handles_.end() && found->second.exportable) return {};
  return refused("cuMemExportToShareableHandle", "the handle was not created exportable");
}

// --- mappings ---

Status CudaLedger::add_mapping(DeviceAddress address, std::uint64_t size, PhysicalHandle handle) {
  constexpr const char* kCall = "cuMemMap";
  const Lock lock(mutex_);
  const auto found = handles_.find(handle);
  if (found == handles_.end()) return refused(kCall, "no such handle");
  if (found->second.size != size || size == 0) return refused(kCall, "the handle has another size");
  if (wraps_around(address, size) || !in_one_range(address.value, size)) {
    return refused(kCall, "it lies in no one reservation");
  }
  if (has_mapping_in(address.value, size)) return refused(kCall, "something is mapped in it");
  mappings_.emplace(address.value, size);
  return {};
}

bool CudaLedger::has_mapping_in(std::uint64_t begin, std::uint64_t size) const {
  const auto after = mappings_.lower_bound(begin + size);
  if (after == mappings_.begin()) return false;
  const auto mapping = std::prev(after);
  return mapping->first + mapping->second > begin;
}

Result<CudaLedger::Mappings> CudaLedger::whole_mappings(const char* call, DeviceAddress address,
                                                        std::uint64_t size) const {
  Mappings whole;
  if (size == 0 || wraps_around(address, size)) return refused(call, "the range is empty or wraps around");
  const std::uint64_t end = address.value + size;
  std::uint64_t at = address.value;
  for (auto it = mappings_.find(at); at < end && it != mappings_.end() && it->first == at; ++it) {
    whole.insert(*it);
    at += it->second;
  }
  if (at != end) return refused(call, "it does not consist of whole mappings");
  return whole;
}

Result<CudaLedger::Mappings> CudaLedger::take_mappings(DeviceAddress address, std::uint64_t size) {
  const Lock lock(mutex_);
  auto whole = whole_mappings("cuMemUnmap", address, size);
  if (!whole.ok()) return whole;
  for (const auto& [at, length] : whole.value()) mappings_.erase(at);
  return whole;
}

void CudaLedger::put_back(const Mappings& mappings) {
  const Lock lock(mutex_);
  mappings_.insert(mappings.begin(), mappings.end());
}

Status CudaLedger::check_mapped(DeviceAddress address, std::uint64_t size) const {
  const Lock lock(mutex_);
  return whole_mappings("cuMemSetAccess", address, size).status();
}

DriverCounts CudaLedger::counts() const {
  const Lock lock(mutex_);
  DriverCounts counts;
  counts.handles = handles_.size();
  counts.ranges = ranges_.size();
  counts.mappings = mappings_.size();
  for (const auto& [handle, what] : handles_) counts.physical_bytes += what.size;
  return counts;
}

}  // namespace cumem
