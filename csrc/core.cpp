#include "core.h"

#include <algorithm>
#include <utility>

#include "process.h"

namespace cumem {
namespace {

using Lock = std::lock_guard<std::mutex>;

constexpr std::uint64_t kDeadBytesLimit = 256 * kMiB;  // malloc reaps above it

std::uint64_t new_segment_id() {
  static std::atomic<std::uint64_t> next{1};  // one for all cores: ids in messages are never ambiguous
  return next++;
}

std::vector<Device> devices_of(const std::vector<SegmentPtr>& segments) {
  std::vector<Device> devices;
  for (const SegmentPtr& segment : segments) {
    if (!segment->mappings.empty()) devices.push_back(segment->properties.device);
  }
  return devices;
}

Status one_buffer_each(const std::vector<Extent>& extents, const std::vector<std::byte*>& buffers) {
  if (extents.size() == buffers.size()) return {};
  return Status(Code::kInvalidValue, "copy",
                std::to_string(extents.size()) + " extents but " + std::to_string(buffers.size()) + " buffers");
}

}  // namespace

BlockHold::BlockHold(std::shared_ptr<Core> core, SegmentPtr segment, Run run)
    : core_(std::move(core)), segment_(std::move(segment)), run_(run) {}

BlockHold::~BlockHold() {
  if (may_call_driver()) core_->table_.drop_block(segment_, run_.offset, run_.length);
}

DeviceAddress BlockHold::address() const { return segment_->address() + run_.offset; }

Device BlockHold::device() const { return segment_->properties.device; }

Core::Core(std::shared_ptr<Driver> driver, CoreOptions options)
    : driver_(std::move(driver)),
      options_(options),
      arena_(std::make_shared<HostArena>(driver_, options_.host_budget_bytes)),
      backups_(arena_),
      waiter_(driver_, options_.device_timeout),
      transfer_(driver_, waiter_) {}

Core::~Core() {
  if (!may_call_driver()) {
    leak(driver_);  // what is left calls it no more, but its own end would take the pages away
    return;
  }
  release_abandoned();
  for (Abandoned& each : abandoned_) leak(std::make_shared<Abandoned>(std::move(each)));  // a copy may still use it
  std::vector<SegmentPtr> all = table_.take_all();
  if (!waiter_.wait(devices_of(all)).ok()) {
    for (SegmentPtr& segment : all) leak(std::move(segment));  // better than a page pulled from under a kernel
    return;
  }
  for (const SegmentPtr& segment : all) (void)destroy(segment);
  (void)close_orphans();
}

std::string Core::broken() const {
  const Lock lock(mutex_);
  return broken_;
}

Status Core::noted(Status status) {
  if (status.code() == Code::kContextBroken) {
    const Lock lock(mutex_);
    if (broken_.empty()) broken_ = status.call() + ": " + status.message();
  }
  return status;
}

// --- what a device can do ---

Result<Core::DeviceFacts> Core::facts(Device device) {
  {
    const Lock lock(mutex_);
    const auto it = facts_.find(device);
    if (it != facts_.end()) return it->second;
  }
  auto probed = probe(device);
  if (!probed.ok()) return probed.status();
  const Lock lock(mutex_);
  facts_.emplace(device, probed.value());
  return probed;
}

Result<Core::DeviceFacts> Core::probe(Device device) {
  const int count = driver_->device_count();
  if (device.ordinal < 0 || device.ordinal >= count) {
    return Status(
        Code::kInvalidValue, "malloc",
        "device " + std::to_string(device.ordinal) + " is not one of the " + std::to_string(count) + " visible");
  }
  auto properties = driver_->properties(device);
  if (!properties.ok()) return properties.status();
  if (!properties.value().virtual_memory) {
    return Status(Code::kUnsupported, "malloc",
                  "device " + std::to_string(device.ordinal) + " (" + properties.value().name +
                      ") has no virtual memory management");
  }
  // Makes the device's context: what needs none of a certain device takes one that exists, and else makes the first's.
  CUMEM_RETURN_IF_ERROR(driver_->memory_info(device).status());
  DeviceFacts facts;
  facts.granularity_bytes = properties.value().granularity_bytes;
  facts.exportable = properties.value().exportable;
  facts.rdma = properties.value().rdma && probe_rdma(device, facts.granularity_bytes);
  facts.access.push_back(device);
  for (int other = 0; other < count; ++other) {
    if (other == device.ordinal) continue;
    const auto reach = driver_->can_access_peer(Device{other}, device);
    if (reach.ok() && reach.value()) facts.access.push_back(Device{other});
  }
  return facts;
}

bool Core::probe_rdma(Device device, std::uint64_t granularity_bytes) {
  auto memory = PhysicalMemory::create(driver_, granularity_bytes, {device, false, true});
  return memory.ok();  // its destructor gives the page back
}

// --- memory ---

Status Core::keep_margin(std::uint64_t size, Device device) {
  if (options_.margin_bytes == 0) return {};
  auto info = driver_->memory_info(device);
  if (!info.ok()) return info.status();
  const std::uint64_t free_bytes = info.value().free_bytes;
  const std::uint64_t usable = free_bytes - std::min(free_bytes, options_.margin_bytes);
  if (size > usable) return Status::out_of_device_memory("malloc (margin)", size, usable);
  return {};
}

Result<SegmentPtr> Core::make_segment(SlotId slot, std::uint64_t size, const AllocationProperties& properties,
                                      const std::vector<Device>& access) {
  CUMEM_RETURN_IF_ERROR(keep_margin(size, properties.device));
  auto range = AddressRange::reserve(driver_, size);
  if (!range.ok()) return range.status();
  auto segment = std::make_shared<Segment>();
  segment->id = SegmentId(new_segment_id());
  segment->slot = slot;
  segment->properties = properties;
  segment->range = std::move(range).value();
  segment->backing = {{0, size}};
  const Status backed = back_once(*segment, access);
  if (backed.ok()) return segment;
  segment->owned = false;
  if (!destroy(segment).ok()) table_.put_dead(segment);  // its clean-up failed too: reap() tries again
  return backed;
}

Result<DeviceAddress> Core::malloc(SlotId slot, std::uint64_t size, Device device, bool shareable, bool captured) {
  auto known = facts(device);
  if (!known.ok()) return noted(known.status());
  const DeviceFacts& device_facts = known.value();
  if (shareable && !device_facts.exportable) {
    return Status(Code::kUnsupported, "malloc", "device " + std::to_string(device.ordinal) + " cannot export memory");
  }
  const auto rounded = round_up(size, device_facts.granularity_bytes);
  if (size == 0 || !rounded) {
    return Status(Code::kInvalidValue, "malloc", "a segment of " + std::to_string(size) + " bytes cannot be made");
  }
  if (table_.dead_bytes() >= kDeadBytesLimit) (void)reap(true);
  const AllocationProperties properties{device, shareable, device_facts.rdma};
  auto made = make_segment(slot, *rounded, properties, device_facts.access);
  if (!made.ok() && made.status().code() == Code::kOutOfDeviceMemory) {
    const Reaped reaped = reap_all(true);  // what it could not end does not matter here
    (void)noted(reaped.first_error);
    if (reaped.bytes > 0) made = make_segment(slot, *rounded, properties, device_facts.access);
  }
  if (!made.ok()) return noted(made.status());
  const DeviceAddress address = made.value()->address();
  made.value()->captured = captured;
  table_.insert(std::move(made).value());
  return address;
}

Status Core::free(DeviceAddress address) {
  auto dropped = table_.drop_owner(address);
  if (!dropped.ok()) return dropped.status();
  const SegmentPtr segment = std::move(dropped).value();
  if (!segment) return {};
  Status status = segment->mappings.empty() ? Status() : driver_->fence(segment->properties.device);
  if (status.ok()) status = destroy(segment);
  if (!status.ok()) table_.put_dead(segment);
  return noted(status);
}

Status Core::free_later(DeviceAddress address) {
  auto dropped = table_.drop_owner(address);
  if (!dropped.ok()) return dropped.status();
  if (dropped.value()) table_.put_dead(std::move(dropped).value());
  return {};
}

Result<std::unique_ptr<BlockHold>> Core::add_block(DeviceAddress address, std::uint64_t offset, std::uint64_t length) {
  auto segment = table_.add_block(address, offset, length);
  if (!segment.ok()) return segment.status();
  return std::make_unique<BlockHold>(shared_from_this(), std::move(segment).value(), Run{offset, length});
}

// Pages first, then addresses, then the backup. After an error it is called again and goes on where it stopped.
Status Core::destroy(const SegmentPtr& segment) {
  CUMEM_RETURN_IF_ERROR(unmap_all(*segment));
  segment->state = SegmentState::kAsleep;  // out of the table: ours alone
  segment->mappings.clear();
  CUMEM_RETURN_IF_ERROR(segment->range.close());
  backups_.drop_segment(segment->id);
  return {};
}

Result<std::uint64_t> Core::reap(bool beside_capture) {
  Reaped reaped = reap_all(beside_capture);
  if (!reaped.first_error.ok()) return noted(std::move(reaped.first_error));
  return reaped.bytes;
}

Core::Reaped Core::reap_all(bool beside_capture) {
  release_abandoned();
  Reaped reaped = close_orphans();
  std::vector<SegmentPtr> dead = table_.take_dead();
  if (dead.empty()) return reaped;
  Status waited = waiter_.wait(devices_of(dead), beside_capture);
  if (!waited.ok()) {
    for (SegmentPtr& segment : dead) table_.put_dead(std::move(segment));
    reaped.first_error = std::move(waited);
    return reaped;
  }
  for (SegmentPtr& segment : dead) {
    const std::uint64_t before = segment->held_bytes();
    const Status status = destroy(segment);
    reaped.bytes += before - segment->held_bytes();
    if (status.ok()) continue;
    if (reaped.first_error.ok()) reaped.first_error = status;
    table_.put_dead(std::move(segment));
  }
  return reaped;
}

void Core::keep_orphan(PhysicalMemory memory) {
  const Lock lock(mutex_);
  orphans_.push_back(std::move(memory));
}

Core::Reaped Core::close_orphans() {
  std::vector<PhysicalMemory> orphans;
  {
    const Lock lock(mutex_);
    orphans.swap(orphans_);
  }
  Reaped reaped;
  for (PhysicalMemory& orphan : orphans) {
    const Status status = orphan.close();
    if (status.ok()) {
      reaped.bytes += orphan.size();
      continue;
    }
    if (reaped.first_error.ok()) reaped.first_error = status;
    const Lock lock(mutex_);
    orphans_.push_back(std::move(orphan));
  }
  return reaped;
}

void Core::release_abandoned() {
  std::vector<Abandoned> taken;
  {
    const Lock lock(mutex_);
    taken.swap(abandoned_);
  }
  for (Abandoned& each : taken) {
    if (noted(waiter_.wait(each.devices)).ok()) continue;  // its blocks go with `taken`
    const Lock lock(mutex_);
    abandoned_.push_back(std::move(each));
  }
}

// --- transitions ---

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

// --- copies ---

Status Core::move(Move::Kind kind, const std::vector<Extent>& extents, const std::vector<std::byte*>& hosts,
                  std::uint8_t byte, bool* in_flight) {
  std::vector<Move> moves;
  moves.reserve(extents.size());
  std::map<SegmentId, SegmentPtr> held;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    const Extent& extent = extents[i];
    SegmentPtr& segment = held[extent.segment];
    if (!segment) {
      const auto found = table_.claimed({extent.segment});
      if (found.empty())
        return Status(Code::kNotFound, "copy", "segment " + std::to_string(extent.segment.value) + " is not claimed");
      segment = found.front();
    }
    if (!segment->has_pages({extent.offset, extent.length})) {
      return Status(Code::kInvalidValue, "copy",
                    "an extent leaves the pages of segment " + std::to_string(extent.segment.value));
    }
    const SegmentState state = table_.state(segment);
    if (state != SegmentState::kResident && state != SegmentState::kMoving) {
      return Status(Code::kWrongState, "copy",
                    "segment " + std::to_string(extent.segment.value) + " is " + state_name(state));
    }
    if (extent.length == 0) continue;
    moves.push_back({kind, segment->properties.device, segment->address() + extent.offset,
                     hosts.empty() ? nullptr : hosts[i], extent.length, byte});
  }
  return noted(transfer_.run(moves, in_flight));
}

Status Core::move_backups(Move::Kind kind, const std::vector<Extent>& extents) {
  auto blocks = backups_.blocks(extents);
  if (!blocks.ok()) return blocks.status();
  std::vector<std::byte*> hosts;
  hosts.reserve(extents.size());
  for (const HostBlockPtr& block : blocks.value()) hosts.push_back(block->data());
  bool in_flight = false;
  Status status = move(kind, extents, hosts, 0, &in_flight);
  if (in_flight) {
    std::vector<SegmentId> ids;
    ids.reserve(extents.size());
    for (const Extent& extent : extents) ids.push_back(extent.segment);
    Abandoned abandoned{devices_of(table_.claimed(ids)), std::move(blocks).value()};
    const Lock lock(mutex_);
    abandoned_.push_back(std::move(abandoned));
  }
  return status;
}

Status Core::fill(const std::vector<Extent>& extents, std::uint8_t byte) {
  return move(Move::Kind::kFill, extents, {}, byte);
}

Status Core::reserve_backup(const std::vector<Extent>& extents) {
  for (const Extent& extent : extents) {
    const auto found = table_.claimed({extent.segment});
    if (found.empty()) {
      return Status(Code::kNotFound, "reserve", "segment " + std::to_string(extent.segment.value) + " is not claimed");
    }
    if (!found.front()->contains({extent.offset, extent.length})) {
      return Status(Code::kInvalidValue, "reserve", "an extent leaves segment " + std::to_string(extent.segment.value));
    }
  }
  return noted(backups_.reserve(extents));
}

Status Core::save(const std::vector<Extent>& extents) { return move_backups(Move::Kind::kToHost, extents); }

Status Core::restore(const std::vector<Extent>& extents) { return move_backups(Move::Kind::kToDevice, extents); }

Status Core::copy_to_host(const std::vector<Extent>& extents, const std::vector<std::byte*>& buffers, bool* in_flight) {
  CUMEM_RETURN_IF_ERROR(one_buffer_each(extents, buffers));
  return move(Move::Kind::kToHost, extents, buffers, 0, in_flight);
}

Status Core::copy_to_device(const std::vector<Extent>& extents, const std::vector<std::byte*>& buffers,
                            bool* in_flight) {
  CUMEM_RETURN_IF_ERROR(one_buffer_each(extents, buffers));
  return move(Move::Kind::kToDevice, extents, buffers, 0, in_flight);
}

void Core::release_backup(const std::vector<Extent>& extents, bool keep_memory) {
  backups_.drop(extents);
  if (!keep_memory) (void)trim_host();
}

Result<std::uint64_t> Core::trim_host() {
  Status failed;
  const std::uint64_t bytes = arena_->trim(&failed);
  if (!failed.ok()) return noted(failed);
  return bytes;
}

Result<HostRange> Core::host_view(DeviceAddress address, std::uint64_t length) const {
  const auto segment = table_.find(address);
  if (!segment) return Status(Code::kNotFound, "host_view", "the address is not managed");
  return backups_.find(segment->id, address.value - segment->address.value, length);
}

std::string Core::check_valid() const {
  std::string law = table_.check_valid();
  if (law.empty()) law = arena_->check_valid();
  if (law.empty()) law = backups_.check_valid();
  return law;
}

}  // namespace cumem
