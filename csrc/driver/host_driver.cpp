#include "host_driver.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <utility>

namespace cumem {
namespace {

using Lock = std::lock_guard<std::mutex>;

Status refused(const char* call, const char* why) { return Status(Code::kInvalidValue, call, why); }

std::uint64_t next_instance() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

Status check_options(const HostDriverOptions& options) {
  constexpr const char* kCall = "HostDriver::create";
  const std::uint64_t g = options.granularity_bytes;
  if (options.device_count < 1 || options.device_count > kMaxHostDevices) {
    return refused(kCall, "device_count must lie in 1 to 64");
  }
  if ((g & (g - 1)) != 0 || g < static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE))) {
    return refused(kCall, "granularity_bytes must be a power of two, no smaller than a page");
  }
  if (options.device_bytes == 0 || options.device_bytes % g != 0) {
    return refused(kCall, "device_bytes must be a positive multiple of granularity_bytes");
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<HostDriver>> HostDriver::create(const HostDriverOptions& options) {
  CUMEM_RETURN_IF_ERROR(check_options(options));
  std::vector<std::shared_ptr<DeviceMemory>> memory;
  for (int i = 0; i < options.device_count; ++i) {
    auto device = DeviceMemory::open(options.device_bytes);
    if (!device.ok()) return device.status();
    memory.push_back(std::move(device).value());
  }
  return std::shared_ptr<HostDriver>(new HostDriver(options, std::move(memory)));
}

HostDriver::HostDriver(const HostDriverOptions& options, std::vector<std::shared_ptr<DeviceMemory>> memory)
    : options_(options),
      owner_(getpid()),
      instance_(next_instance()),
      memory_(std::move(memory)),
      addresses_(options.granularity_bytes),
      streams_(options.device_count, addresses_, registrations_) {}

// --- checks; all but the first under the lock ---

// Before the lock, which another thread of the parent may hold for ever in a forked child.
Status HostDriver::check_process(const char* call) const {
  if (getpid() == owner_) return {};
  return Status(Code::kDriver, call, "this is a fork of the process that made the driver");
}

Status HostDriver::check_device(const char* call, Device device) const {
  if (device.ordinal < 0 || device.ordinal >= options_.device_count) return refused(call, "no such device");
  return streams_.check_context(call, device);
}

Status HostDriver::check_owners(const char* call, DeviceAddress address, std::uint64_t size) const {
  const DeviceMask owners = addresses_.owners(address, size);
  for (int i = 0; i < options_.device_count; ++i) {
    if ((owners & mask_of(Device{i})) != 0) CUMEM_RETURN_IF_ERROR(streams_.check_context(call, Device{i}));
  }
  return {};
}

Result<HostDriver::Handle> HostDriver::find_handle(const char* call, PhysicalHandle handle) const {
  const auto found = handles_.find(handle);
  if (found == handles_.end()) return refused(call, "no such handle");
  CUMEM_RETURN_IF_ERROR(streams_.check_context(call, found->second.owner));
  return found->second;
}

// --- devices ---

DriverCounts HostDriver::counts() const {
  DriverCounts counts;
  if (!check_process("counts").ok()) return counts;
  const Lock lock(mutex_);
  counts.handles = handles_.size();
  counts.ranges = addresses_.range_count();
  counts.mappings = addresses_.mapping_count();
  counts.registrations = registrations_.count();
  counts.streams = streams_.stream_count();
  counts.events = streams_.event_count();
  for (const auto& [handle, held] : handles_) counts.physical_bytes += held.pages->size();
  return counts;
}

Result<DeviceProperties> HostDriver::properties(Device device) {
  CUMEM_RETURN_IF_ERROR(check_process("properties"));
  const Lock lock(mutex_);
  CUMEM_RETURN_IF_ERROR(check_device("properties", device));
  char uuid[64];
  std::snprintf(uuid, sizeof uuid, "GPU-%08x-0000-0000-%04x-%012x", static_cast<unsigned>(owner_),
                static_cast<unsigned>(instance_ & 0xffff), static_cast<unsigned>(device.ordinal));
  DeviceProperties properties;
  properties.name = "emulated on host memory";
  properties.uuid = uuid;
  properties.total_bytes = options_.device_bytes;
  properties.granularity_bytes = options_.granularity_bytes;
  properties.virtual_memory = true;
  properties.exportable = true;
  return properties;
}

Result<MemoryInfo> HostDriver::memory_info(Device device) {
  CUMEM_RETURN_IF_ERROR(check_process("memory_info"));
  const Lock lock(mutex_);
  CUMEM_RETURN_IF_ERROR(check_device("memory_info", device));
  return MemoryInfo{memory_of(device).free_bytes(), options_.device_bytes};
}

Result<bool> HostDriver::can_access_peer(Device from, Device to) {
  CUMEM_RETURN_IF_ERROR(check_process("can_access_peer"));
  const Lock lock(mutex_);
  CUMEM_RETURN_IF_ERROR(check_device("can_access_peer", from));
  CUMEM_RETURN_IF_ERROR(check_device("can_access_peer", to));
  return from != to;
}

// --- addresses and pages ---

Result<DeviceAddress> HostDriver::reserve(std::uint64_t size) {
  CUMEM_RETURN_IF_ERROR(check_process("reserve"));
  const Lock lock(mutex_);
  return addresses_.reserve(size);
}

Status HostDriver::address_free(DeviceAddress address, std::uint64_t size) {
  CUMEM_RETURN_IF_ERROR(check_process("address_free"));
  const Lock lock(mutex_);
  CUMEM_RETURN_IF_ERROR(check_owners("address_free", address, size));
  return addresses_.address_free(address, size);
}

PhysicalHandle HostDriver::publish(std::shared_ptr<HostPages> pages, Device owner) {
  const PhysicalHandle handle(++last_handle_);
  handles_.emplace(handle, Handle{std::move(pages), owner});
  return handle;
}

Result<PhysicalHandle> HostDriver::create(std::uint64_t size, const AllocationProperties& properties) {
  CUMEM_RETURN_IF_ERROR(check_process("create"));
  std::unique_lock<std::mutex> lock(mutex_);
  CUMEM_RETURN_IF_ERROR(check_device("create", properties.device));
  if (!addresses_.is_aligned(size)) return refused("create", "the size is no positive multiple of the granularity");
  if (properties.rdma) return Status(Code::kUnsupported, "create", "emulated devices know no RDMA");
  auto allocated = memory_of(properties.device).allocate(size, properties.exportable);
  if (!allocated.ok()) return allocated.status();
  std::shared_ptr<HostPages> pages = std::move(allocated).value();
  lock.unlock();
  const Status poisoned = pages->poison();  // long; nobody else knows these pages yet
  lock.lock();
  if (!poisoned.ok()) {
    pages.reset();  // under the lock: it gives the pages back
    return poisoned;
  }
  return publish(std::move(pages), properties.device);
}

Status HostDriver::release(PhysicalHandle handle) {
  CUMEM_RETURN_IF_ERROR(check_process("release"));
  const Lock lock(mutex_);
  const auto found = find_handle("release", handle);
  if (!found.ok()) return found.status();
  handles_.erase(handle);
  return {};
}

Status HostDriver::map(DeviceAddress address, std::uint64_t size, PhysicalHandle handle) {
  CUMEM_RETURN_IF_ERROR(check_process("map"));
  const Lock lock(mutex_);
  auto found = find_handle("map", handle);
  if (!found.ok()) return found.status();
  return addresses_.map(address, size, found.value().pages, found.value().owner);
}

Status HostDriver::set_access(DeviceAddress address, std::uint64_t size, const std::vector<Device>& devices) {
  CUMEM_RETURN_IF_ERROR(check_process("set_access"));
  const Lock lock(mutex_);
  DeviceMask mask = 0;
  for (const Device device : devices) {
    CUMEM_RETURN_IF_ERROR(check_device("set_access", device));
    mask |= mask_of(device);
  }
  CUMEM_RETURN_IF_ERROR(check_owners("set_access", address, size));
  return addresses_.set_access(address, size, mask);
}

Status HostDriver::unmap(DeviceAddress address, std::uint64_t size) {
  CUMEM_RETURN_IF_ERROR(check_process("unmap"));
  const Lock lock(mutex_);
  CUMEM_RETURN_IF_ERROR(check_owners("unmap", address, size));
  return addresses_.unmap(address, size);
}

Result<int> HostDriver::export_fd(PhysicalHandle handle) {
  CUMEM_RETURN_IF_ERROR(check_process("export_fd"));
  const Lock lock(mutex_);
  auto found = find_handle("export_fd", handle);
  if (!found.ok()) return found.status();
  return found.value().pages->export_fd();
}

Result<PhysicalHandle> HostDriver::import_fd(int fd, std::uint64_t size) {
  CUMEM_RETURN_IF_ERROR(check_process("import_fd"));
  const Lock lock(mutex_);
  CUMEM_RETURN_IF_ERROR(check_device("import_fd", Device{0}));
  if (!addresses_.is_aligned(size)) return refused("import_fd", "the size is no positive multiple of the granularity");
  auto pages = import_pages(fd, size);
  if (!pages.ok()) return pages.status();
  return publish(std::move(pages).value(), Device{0});
}

// --- host memory ---

Status HostDriver::register_host(void* host, std::uint64_t size) {
  CUMEM_RETURN_IF_ERROR(check_process("register_host"));
  const Lock lock(mutex_);
  if (options_.refuse_pinning) return Status(Code::kUnsupported, "register_host", "pinning is refused");
  if (addresses_.touches_reservation(reinterpret_cast<std::uintptr_t>(host), size)) {
    return refused("register_host", "the range is device memory");
  }
  return registrations_.add(host, size);
}

Status HostDriver::unregister_host(void* host) {
  CUMEM_RETURN_IF_ERROR(check_process("unregister_host"));
  const Lock lock(mutex_);
  return registrations_.remove(host);
}

// --- streams, events, copies ---

Result<StreamHandle> HostDriver::create_stream(Device device) {
  CUMEM_RETURN_IF_ERROR(check_process("create_stream"));
  const Lock lock(mutex_);
  CUMEM_RETURN_IF_ERROR(check_device("create_stream", device));
  return streams_.create_stream(device);
}

Status HostDriver::destroy_stream(StreamHandle stream) {
  CUMEM_RETURN_IF_ERROR(check_process("destroy_stream"));
  const Lock lock(mutex_);
  return streams_.destroy_stream(stream);
}

Result<EventHandle> HostDriver::create_event(Device device) {
  CUMEM_RETURN_IF_ERROR(check_process("create_event"));
  const Lock lock(mutex_);
  CUMEM_RETURN_IF_ERROR(check_device("create_event", device));
  return streams_.create_event(device);
}

Status HostDriver::destroy_event(EventHandle event) {
  CUMEM_RETURN_IF_ERROR(check_process("destroy_event"));
  const Lock lock(mutex_);
  return streams_.destroy_event(event);
}

Status HostDriver::record_event(EventHandle event, StreamHandle stream) {
  CUMEM_RETURN_IF_ERROR(check_process("record_event"));
  const Lock lock(mutex_);
  return streams_.record_event(event, stream);
}

Result<bool> HostDriver::query_event(EventHandle event) {
  CUMEM_RETURN_IF_ERROR(check_process("query_event"));
  const Lock lock(mutex_);
  return streams_.query_event(event);
}

Status HostDriver::enqueue_copy(const char* call, HostOperation operation, const void* host, StreamHandle stream) {
  CUMEM_RETURN_IF_ERROR(check_process(call));
  const Lock lock(mutex_);
  operation.host = reinterpret_cast<std::uintptr_t>(host);
  if (operation.size != 0 && host == nullptr) return refused(call, "the host address is null");
  if (operation.size != 0 && addresses_.touches_reservation(operation.host, operation.size)) {
    return refused(call, "the host range is device memory");
  }
  const auto registration = registrations_.find(call, host, operation.size);
  if (!registration.ok()) return registration.status();
  operation.registration = registration.value();
  return streams_.enqueue(call, stream, operation);
}

Status HostDriver::copy_to_host(void* host, DeviceAddress device, std::uint64_t size, StreamHandle stream) {
  return enqueue_copy("copy_to_host", {HostOperation::Kind::kCopyToHost, device, size}, host, stream);
}

Status HostDriver::copy_to_device(DeviceAddress device, const void* host, std::uint64_t size, StreamHandle stream) {
  return enqueue_copy("copy_to_device", {HostOperation::Kind::kCopyToDevice, device, size}, host, stream);
}

Status HostDriver::fill(DeviceAddress device, std::uint8_t byte, std::uint64_t size, StreamHandle stream) {
  CUMEM_RETURN_IF_ERROR(check_process("fill"));
  const Lock lock(mutex_);
  return streams_.enqueue("fill", stream, {HostOperation::Kind::kFill, device, size, 0, 0, byte});
}

Status HostDriver::launch_fill(DeviceAddress address, std::uint8_t byte, std::uint64_t size) {
  CUMEM_RETURN_IF_ERROR(check_process("launch_fill"));
  const Lock lock(mutex_);
  const auto owner = addresses_.owner_at(address);
  if (!owner) return refused("launch_fill", "nothing is mapped at the address");
  return streams_.launch(*owner, {HostOperation::Kind::kFill, address, size, 0, 0, byte});
}

// --- waits ---

Status HostDriver::synchronize(Device device) {
  CUMEM_RETURN_IF_ERROR(check_process("synchronize"));
  const Lock lock(mutex_);
  CUMEM_RETURN_IF_ERROR(check_device("synchronize", device));
  return streams_.synchronize(device);
}

}  // namespace cumem
