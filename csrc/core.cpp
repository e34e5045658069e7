#include "core.h"

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
  (void)arena_->trim();  // a registration that does not end now is tried once more when its slab dies
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

Result<std::unique_ptr<BlockHold>> Core::malloc_block(SlotId slot, std::uint64_t size, Device device, bool shareable) {
  auto address = malloc(slot, size, device, shareable);
  if (!address.ok()) return address.status();
  auto block = add_block(address.value(), 0, size);
  const Status dropped = free_later(address.value());
  if (block.ok() && !dropped.ok()) return dropped;
  return block;
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
  release_abandoned(beside_capture);
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

void Core::release_abandoned(bool beside_capture) {
  std::vector<Abandoned> taken;
  {
    const Lock lock(mutex_);
    taken.swap(abandoned_);
  }
  for (Abandoned& each : taken) {
    if (noted(waiter_.wait(each.devices, beside_capture)).ok()) continue;  // its blocks go with `taken`
    const Lock lock(mutex_);
    abandoned_.push_back(std::move(each));
  }
}

std::string Core::check_valid() const {
  std::string law = table_.check_valid();
  if (law.empty()) law = arena_->check_valid();
  if (law.empty()) law = backups_.check_valid();
  return law;
}

}  // namespace cumem
