// Core: pages of claimed segments come and go.
#include <utility>

#include "core.h"

namespace cumem {

std::vector<SegmentId> Core::claim(const std::vector<SegmentId>& ids) {
  std::vector<SegmentId> held;
  for (const SegmentPtr& segment : table_.claim(ids)) held.push_back(segment->id);
  return held;
}

Status Core::wait_devices(const std::vector<Device>& devices, bool beside_capture) {
  return noted(waiter_.wait(devices, beside_capture));
}

Result<MemoryInfo> Core::memory_info(Device device) {
  auto info = driver_->memory_info(device);
  if (!info.ok()) return noted(info.status());
  return info;
}

Status Core::unmap_all(Segment& segment) {
  while (!segment.mappings.empty()) {
    CUMEM_RETURN_IF_ERROR(segment.mappings.back().close());
    segment.mappings.pop_back();
  }
  return {};
}

Outcome Core::unmap_one(const SegmentPtr& segment) {
  const std::size_t before = segment->mappings.size();
  Status first;
  while (!segment->mappings.empty()) {
    Mapping& last = segment->mappings.back();
    Status status = last.close();
    if (!status.ok() && status.code() != Code::kContextBroken) status = last.close();
    if (!status.ok()) {
      if (first.ok()) first = status;
      if (last.mapped()) break;
      // Unmapped, but its pages were not taken back: reap() tries again, the segment goes on.
      keep_orphan(last.take_memory());
    }
    segment->mappings.pop_back();
  }
  if (segment->mappings.empty()) {
    table_.set_state(segment, SegmentState::kAsleep);
  } else if (segment->mappings.size() != before || first.code() == Code::kContextBroken) {
    table_.set_state(segment, SegmentState::kLost);
  }
  return {segment->id, noted(first)};
}

std::vector<Outcome> Core::unmap(const std::vector<SegmentId>& ids) {
  std::vector<Outcome> outcomes;
  for (const SegmentPtr& segment : table_.claimed(ids)) {
    if (table_.state(segment) != SegmentState::kAsleep) outcomes.push_back(unmap_one(segment));
  }
  return outcomes;
}

// On an error the segment has no mapping, or leftovers that the next call removes first.
Status Core::back_once(Segment& segment, const std::vector<Device>& access) {
  CUMEM_RETURN_IF_ERROR(unmap_all(segment));
  for (const Run& run : segment.backing) {
    const Status status = back_run(segment, run, access);
    if (status.ok()) continue;
    (void)unmap_all(segment);
    return status;
  }
  return {};
}

Status Core::back_run(Segment& segment, const Run& run, const std::vector<Device>& access) {
  auto memory = PhysicalMemory::create(driver_, run.length, segment.properties);
  if (!memory.ok()) return memory.status();
  auto mapping = Mapping::map(driver_, segment.address() + run.offset, memory.value());
  if (!mapping.ok()) {
    if (!memory.value().close().ok()) keep_orphan(std::move(memory).value());
    return mapping.status();
  }
  const Status status = mapping.value().set_access(access);
  if (status.ok() || !mapping.value().close().ok()) segment.mappings.push_back(std::move(mapping).value());
  return status;
}

Status Core::set_backing(SegmentId id, const std::vector<Run>& runs) {
  const auto held = table_.claimed({id});
  if (held.empty())
    return Status(Code::kNotFound, "set_backing", "segment " + std::to_string(id.value) + " is not claimed");
  const SegmentPtr& segment = held.front();
  if (segment->properties.exportable || segment->captured || table_.state(segment) != SegmentState::kAsleep) {
    return Status(Code::kWrongState, "set_backing",
                  "segment " + std::to_string(id.value) + " is shareable, captured or not asleep: it keeps its pages");
  }
  std::uint64_t end = 0;
  for (const Run& run : runs) {
    if (run.offset < end || !segment->contains(run)) {
      return Status(Code::kInvalidValue, "set_backing", "the runs are not ascending parts of the segment");
    }
    end = run.offset + run.length;
  }
  auto known = facts(segment->properties.device);
  if (!known.ok()) return noted(known.status());
  table_.set_backing(segment, page_runs(runs, segment->size(), known.value().granularity_bytes));
  return {};
}

Status Core::back(Segment& segment) {
  auto known = facts(segment.properties.device);
  if (!known.ok()) return known.status();
  Status status = back_once(segment, known.value().access);
  const bool again = !status.ok() && status.code() != Code::kOutOfDeviceMemory && status.code() != Code::kContextBroken;
  return again ? back_once(segment, known.value().access) : status;
}

Outcome Core::map_one(const SegmentPtr& segment) {
  const Status status = back(*segment);
  if (status.ok()) {
    table_.set_state(segment, SegmentState::kMoving);
  } else if (segment->mappings.empty()) {
    table_.set_state(segment, SegmentState::kAsleep);
  } else {
    table_.set_state(segment, SegmentState::kLost);
  }
  return {segment->id, noted(status)};
}

std::vector<Outcome> Core::map(const std::vector<SegmentId>& ids) {
  std::vector<Outcome> outcomes;
  (void)close_orphans();  // pages that could not be released are needed now
  for (const SegmentPtr& segment : table_.claimed(ids)) {
    const SegmentState state = table_.state(segment);
    if (state == SegmentState::kAsleep || state == SegmentState::kLost) outcomes.push_back(map_one(segment));
  }
  return outcomes;
}

void Core::settle(const std::vector<SegmentId>& ids) {
  for (const SegmentPtr& segment : table_.claimed(ids)) {
    if (table_.state(segment) == SegmentState::kMoving) table_.set_state(segment, SegmentState::kResident);
  }
}

}  // namespace cumem
