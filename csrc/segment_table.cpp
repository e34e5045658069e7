#include "segment_table.h"

#include <utility>

namespace cumem {
namespace {

using Lock = std::lock_guard<std::mutex>;

std::uint64_t sum_lengths(const std::vector<Run>& runs) {
  std::uint64_t sum = 0;
  for (const Run& run : runs) sum += run.length;
  return sum;
}

SegmentInfo info_of(const Segment& segment) {
  SegmentInfo info;
  info.id = segment.id;
  info.slot = segment.slot;
  info.address = segment.address();
  info.size = segment.size();
  info.backing_bytes = segment.backing_bytes();
  info.device = segment.properties.device;
  info.shareable = segment.properties.exportable;
  info.owned = segment.owned;
  info.captured = segment.captured;
  info.state = segment.state;
  info.live_bytes = sum_lengths(live_runs(segment.live_blocks(), segment.size(), 0));
  return info;
}

Status no_segment(const char* call, DeviceAddress address) {
  return Status(Code::kNotFound, call, "no segment at address " + std::to_string(address.value));
}

}  // namespace

std::vector<Device> devices_of(const std::vector<SegmentPtr>& segments) {
  std::vector<Device> devices;
  for (const SegmentPtr& segment : segments) {
    if (!segment->mappings.empty()) devices.push_back(segment->properties.device);
  }
  return devices;
}

void SegmentTable::insert(SegmentPtr segment) {
  const Lock lock(mutex_);
  by_id_.emplace(segment->id, segment);
  by_address_.emplace(segment->address().value, std::move(segment));
}

SegmentTable::ByAddress::const_iterator SegmentTable::containing(DeviceAddress address) const {
  auto next = by_address_.upper_bound(address.value);
  if (next == by_address_.begin()) return by_address_.end();
  --next;
  return address.value - next->first < next->second->size() ? next : by_address_.end();
}

std::optional<SegmentInfo> SegmentTable::find(DeviceAddress address) const {
  const Lock lock(mutex_);
  const auto it = containing(address);
  if (it == by_address_.end()) return std::nullopt;
  return info_of(*it->second);
}

std::vector<SegmentInfo> SegmentTable::list(std::optional<SlotId> slot) const {
  const Lock lock(mutex_);
  std::vector<SegmentInfo> infos;
  for (const auto& [address, segment] : by_address_) {
    if (!segment->dead() && (!slot || segment->slot == *slot)) infos.push_back(info_of(*segment));
  }
  return infos;
}

std::vector<Extent> SegmentTable::live_extents(const std::vector<SegmentId>& ids) const {
  const Lock lock(mutex_);
  std::vector<Extent> extents;
  for (const SegmentId id : ids) {
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) continue;
    for (const Run& run : live_runs(it->second->live_blocks(), it->second->size())) {
      extents.push_back({id, run.offset, run.length});
    }
  }
  return extents;
}

Result<SegmentPtr> SegmentTable::drop_owner(DeviceAddress address) {
  const Lock lock(mutex_);
  const auto it = by_address_.find(address.value);
  if (it == by_address_.end() || !it->second->owned) return no_segment("free", address);
  SegmentPtr segment = it->second;
  segment->owned = false;
  if (!segment->dead() || segment->claims > 0) return SegmentPtr();
  erase(segment);
  return segment;
}

Result<SegmentPtr> SegmentTable::add_block(DeviceAddress address, std::uint64_t offset, std::uint64_t length) {
  const Lock lock(mutex_);
  const auto it = by_address_.find(address.value);
  if (it == by_address_.end() || it->second->dead()) return no_segment("add_block", address);
  const SegmentPtr& segment = it->second;
  if (length == 0 || !segment->contains({offset, length})) {
    return Status(Code::kInvalidValue, "add_block",
                  "block of " + std::to_string(length) + " bytes at offset " + std::to_string(offset) +
                      " is not in a segment of " + std::to_string(segment->size()) + " bytes");
  }
  segment->blocks.emplace(offset, length);
  return segment;
}

void SegmentTable::drop_block(const SegmentPtr& segment, std::uint64_t offset, std::uint64_t length) {
  const Lock lock(mutex_);
  const auto [first, last] = segment->blocks.equal_range(offset);
  for (auto it = first; it != last; ++it) {
    if (it->second == length) {
      segment->blocks.erase(it);
      break;
    }
  }
  bury_if_dead(segment);
}

void SegmentTable::bury_if_dead(const SegmentPtr& segment) {
  if (!segment->dead() || segment->claims > 0 || by_id_.count(segment->id) == 0) return;
  dead_.push_back(segment);
  erase(segment);
}

void SegmentTable::erase(const SegmentPtr& segment) {
  const std::uint64_t address = segment->address().value;
  by_id_.erase(segment->id);  // `segment` may lie in a map: the first erase may end it
  by_address_.erase(address);
}

std::vector<SegmentPtr> SegmentTable::claim(const std::vector<SegmentId>& ids) {
  const Lock lock(mutex_);
  std::vector<SegmentPtr> held;
  for (const SegmentId id : ids) {
    const auto it = by_id_.find(id);
    if (it == by_id_.end() || it->second->dead()) continue;
    ++it->second->claims;
    held.push_back(it->second);
  }
  return held;
}

void SegmentTable::unclaim(const std::vector<SegmentId>& ids) {
  const Lock lock(mutex_);
  for (const SegmentId id : ids) {
    const auto it = by_id_.find(id);
    if (it == by_id_.end() || it->second->claims == 0) continue;
    const SegmentPtr segment = it->second;
    --segment->claims;
    bury_if_dead(segment);
  }
}

std::vector<SegmentPtr> SegmentTable::claimed(const std::vector<SegmentId>& ids) const {
  const Lock lock(mutex_);
  std::vector<SegmentPtr> held;
  for (const SegmentId id : ids) {
    const auto it = by_id_.find(id);
    if (it != by_id_.end() && it->second->claims > 0) held.push_back(it->second);
  }
  return held;
}

void SegmentTable::set_state(const SegmentPtr& segment, SegmentState state) {
  const Lock lock(mutex_);
  segment->state = state;
}

void SegmentTable::set_backing(const SegmentPtr& segment, std::vector<Run> backing) {
  const Lock lock(mutex_);
  segment->backing = std::move(backing);
}

SegmentState SegmentTable::state(const SegmentPtr& segment) const {
  const Lock lock(mutex_);
  return segment->state;
}

std::vector<SegmentPtr> SegmentTable::take_dead() {
  const Lock lock(mutex_);
  return std::exchange(dead_, {});
}

void SegmentTable::put_dead(SegmentPtr segment) {
  const Lock lock(mutex_);
  dead_.push_back(std::move(segment));
}

std::uint64_t SegmentTable::dead_bytes() const {
  const Lock lock(mutex_);
  std::uint64_t sum = 0;
  for (const SegmentPtr& segment : dead_) sum += segment->held_bytes();
  return sum;
}

std::vector<SegmentPtr> SegmentTable::take_all() {
  const Lock lock(mutex_);
  std::vector<SegmentPtr> all = std::exchange(dead_, {});
  for (auto& [id, segment] : by_id_) all.push_back(segment);
  by_id_.clear();
  by_address_.clear();
  return all;
}

std::string SegmentTable::check_valid() const {
  const Lock lock(mutex_);
  if (by_id_.size() != by_address_.size()) return "by_id and by_address differ in size";
  std::uint64_t end = 0;
  for (const auto& [address, segment] : by_address_) {
    const std::string name = "segment " + std::to_string(segment->id.value);
    if (address != segment->address().value) return name + " is filed under another address";
    if (address < end) return name + " overlaps the one before it";
    end = address + segment->size();
    if (by_id_.count(segment->id) == 0) return name + " has no entry by id";
    if (segment->dead() && segment->claims == 0) return name + " is dead, unclaimed and still in the table";
    for (const auto& [offset, length] : segment->blocks) {
      if (!segment->contains({offset, length})) return name + " has a block outside of it";
    }
    if (segment->claims > 0) continue;  // its pages are moving
    std::uint64_t mapped = 0;
    for (const Mapping& mapping : segment->mappings) mapped += mapping.mapped() ? mapping.size() : 0;
    if (segment->mapped() && mapped != segment->backing_bytes())
      return name + " is " + state_name(segment->state) + " but not mapped";
    if (segment->state == SegmentState::kAsleep && mapped != 0) return name + " is asleep but mapped";
  }
  for (const SegmentPtr& segment : dead_) {
    if (!segment->dead() || segment->claims > 0) return "the dead list holds a living segment";
  }
  return {};
}

}  // namespace cumem
