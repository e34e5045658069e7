// HostDriver: the laws of driver.h on host memory, kept strictly and without a GPU.
//
// What it makes visible that a GPU shows only sometimes:
//   - capacity per device; create fails with the numbers. Fresh pages hold kFreshPoison, in every byte.
//   - memory that is not mapped, or to which no device was given access, faults when touched.
//   - bytes of released pages really leave the machine's memory (host_pages.h), exports and imports counted.
//   - work runs late and in a fixed order (host_streams.h): who does not wait gets wrong bytes, every time.
//   - an illegal access breaks its device for ever. Then every call that names the device, or a handle, range, stream
//   or event
//     of it, fails with kContextBroken; name, counts, device_count and calls that name no device (reserve, address_free
//     of an empty range, register_host, unregister_host) go on working. The destructor still takes everything back.
//   - copies' host memory is never device memory, and lies in one registration or in none.
// Refusals are kInvalidValue and leave nothing changed.
//
// What it simplifies: an import belongs to device 0, and is charged to its exporter only. Devices are this object's
// own: two drivers share no capacity. Access once given to one device makes the pages touchable for the CPU, which
// stands for all of them; which device may touch what is checked when work runs.
//
// Threads: any. One mutex, held through each call, also while bytes move (host_streams.h says why) except while fresh
// pages are poisoned. It is a leaf: nothing is called under it but the kernel.
// Fork: in a child every call but name, counts and device_count fails with kDriver, and the destructor changes neither
// the parent's pages nor its files. Its memory is shared with the parent, as a device's would be.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"
#include "host_address_space.h"
#include "host_pages.h"
#include "host_registrations.h"
#include "host_streams.h"

namespace cumem {

struct HostDriverOptions {
  int device_count = 2;                        // 1 to kMaxHostDevices
  std::uint64_t device_bytes = 8 * kGiB;       // each; a positive multiple of the granularity
  std::uint64_t granularity_bytes = 2 * kMiB;  // a power of two, no smaller than the machine's page
  bool refuse_pinning = false;                 // register_host answers kUnsupported, always
};

class HostDriver final : public Driver {
 public:
  static Result<std::shared_ptr<HostDriver>> create(const HostDriverOptions& options);

  // Queues a fill on a stream of the address's device that nobody can name, and returns: a kernel in flight.
  // kInvalidValue if nothing is mapped at `address`.
  Status launch_fill(DeviceAddress address, std::uint8_t byte, std::uint64_t size);

  [[nodiscard]] std::string name() const override { return "host"; }
  [[nodiscard]] MemoryKind memory_kind() const override { return MemoryKind::kHost; }
  [[nodiscard]] DriverCounts counts() const override;

  [[nodiscard]] int device_count() override { return options_.device_count; }
  Result<DeviceProperties> properties(Device device) override;
  Result<MemoryInfo> memory_info(Device device) override;
  Result<bool> can_access_peer(Device from, Device to) override;

  Result<DeviceAddress> reserve(std::uint64_t size) override;
  Status address_free(DeviceAddress address, std::uint64_t size) override;
  // kUnsupported if `properties` ask for RDMA.
  Result<PhysicalHandle> create(std::uint64_t size, const AllocationProperties& properties) override;
  Status release(PhysicalHandle handle) override;
  Status map(DeviceAddress address, std::uint64_t size, PhysicalHandle handle) override;
  Status set_access(DeviceAddress address, std::uint64_t size, const std::vector<Device>& devices) override;
  Status unmap(DeviceAddress address, std::uint64_t size) override;
  Result<int> export_fd(PhysicalHandle handle) override;
  Result<PhysicalHandle> import_fd(int fd, std::uint64_t size) override;

  Status register_host(void* host, std::uint64_t size) override;
  Status unregister_host(void* host) override;

  Result<StreamHandle> create_stream(Device device) override;
  Status destroy_stream(StreamHandle stream) override;
  Result<EventHandle> create_event(Device device) override;
  Status destroy_event(EventHandle event) override;
  Status record_event(EventHandle event, StreamHandle stream) override;
  Result<bool> query_event(EventHandle event) override;
  Status copy_to_host(void* host, DeviceAddress device, std::uint64_t size, StreamHandle stream) override;
  Status copy_to_device(DeviceAddress device, const void* host, std::uint64_t size, StreamHandle stream) override;
  Status fill(DeviceAddress device, std::uint8_t byte, std::uint64_t size, StreamHandle stream) override;

  Status synchronize(Device device) override;

 private:
  struct Handle {
    std::shared_ptr<HostPages> pages;
    Device owner;
  };

  HostDriver(const HostDriverOptions& options, std::vector<std::shared_ptr<DeviceMemory>> memory);
  Status check_process(const char* call) const;
  // kInvalidValue unless there is such a device, kContextBroken if it is broken.
  Status check_device(const char* call, Device device) const;
  Status check_owners(const char* call, DeviceAddress address, std::uint64_t size) const;
  Status enqueue_copy(const char* call, HostOperation operation, const void* host, StreamHandle stream);
  Result<Handle> find_handle(const char* call, PhysicalHandle handle) const;
  PhysicalHandle publish(std::shared_ptr<HostPages> pages, Device owner);
  DeviceMemory& memory_of(Device device) { return *memory_[static_cast<std::size_t>(device.ordinal)]; }

  const HostDriverOptions options_;
  const pid_t owner_;
  const std::uint64_t instance_;  // of the process, for the devices' uuids
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<DeviceMemory>> memory_;  // by device
  HostRegistrations registrations_;
  std::map<PhysicalHandle, Handle> handles_;
  std::uint64_t last_handle_ = 0;
  HostAddressSpace addresses_;
  HostStreams streams_;  // refers to the two tables above
};

}  // namespace cumem
