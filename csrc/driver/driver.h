// The contract of a virtual-memory driver: one method a primitive. CudaDriver and HostDriver keep the same laws; the
// conformance tests run over both. FaultyDriver wraps either.
//
// Conventions, for every method:
//   - Thread safe. Callable with any or no device current; the caller's current device is the same afterwards.
//   - Never takes the GIL, never throws, never exits. Sizes are in bytes.
//   - On an error nothing has changed, unless the code is kContextBroken: then nothing is known any more.
//   - No error is remembered: a failed call never makes a later, correct call fail (kContextBroken excepted).
//   - Legal while a stream of the process is being captured, synchronize excepted.
//   - Capability queries that fail answer "no"; they never make a later call fail.
//
// Laws of memory (g = granularity of the device):
//   - create, reserve, map, set_access and unmap take sizes > 0 that are multiples of g; addresses are multiples of g.
//   - Physical bytes return to the device when the handle is released AND all its mappings are gone AND no exported
//     descriptor or import of it is left. The order does not matter.
//   - A fresh mapping has no access; every map needs its own set_access. Fresh pages have undefined contents.
//   - unmap covers whole mappings only. address_free takes exactly what reserve gave, with nothing mapped in it.
//   - unmap does not wait for work in flight: whoever unmaps has waited.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../status.h"
#include "../types.h"

namespace cumem {

struct DeviceProperties {
  std::string name;
  std::string uuid;  // "GPU-..." as NVML writes it
  std::uint64_t total_bytes = 0;
  std::uint64_t granularity_bytes = 0;  // power of two
  bool virtual_memory = false;          // the primitives below work
  bool exportable = false;              // handles can be exported as POSIX file descriptors
  bool rdma = false;                    // handles can be GPUDirect RDMA capable
  bool integrated = false;              // device and host share their memory
};

struct MemoryInfo {
  std::uint64_t free_bytes = 0;
  std::uint64_t total_bytes = 0;
};

// Fixed at create; a wake re-creates with the same.
struct AllocationProperties {
  Device device;
  bool exportable = false;
  bool rdma = false;
};

// What the driver object itself has made and not yet taken back (imports count as handles). All zero: no leak.
struct DriverCounts {
  std::uint64_t handles = 0;
  std::uint64_t ranges = 0;
  std::uint64_t mappings = 0;
  std::uint64_t registrations = 0;
  std::uint64_t streams = 0;
  std::uint64_t events = 0;
  std::uint64_t physical_bytes = 0;  // sum of the sizes of live handles
};

enum class MemoryKind { kCuda, kHost };  // what a tensor over this driver's memory is to torch

class Driver {
 public:
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  virtual ~Driver() = default;

  [[nodiscard]] virtual std::string name() const = 0;  // "cuda", "host"
  [[nodiscard]] virtual MemoryKind memory_kind() const = 0;
  [[nodiscard]] virtual DriverCounts counts() const = 0;

  // --- devices ---
  [[nodiscard]] virtual int device_count() = 0;
  virtual Result<DeviceProperties> properties(Device device) = 0;
  virtual Result<MemoryInfo> memory_info(Device device) = 0;  // of the whole device, other processes included
  // Whether work on `from` may access memory of `to`. false for from == to.
  virtual Result<bool> can_access_peer(Device from, Device to) = 0;

  // --- addresses and pages ---
  virtual Result<DeviceAddress> reserve(std::uint64_t size) = 0;
  virtual Status address_free(DeviceAddress address, std::uint64_t size) = 0;
  // kOutOfDeviceMemory carries needed and free bytes.
  virtual Result<PhysicalHandle> create(std::uint64_t size, const AllocationProperties& properties) = 0;
  virtual Status release(PhysicalHandle handle) = 0;
  // pre: [address, address + size) lies in one reservation, nothing is mapped in it; size == the handle's size.
  virtual Status map(DeviceAddress address, std::uint64_t size, PhysicalHandle handle) = 0;
  // Read and write access for `devices`. pre: the range is fully mapped, whole mappings.
  virtual Status set_access(DeviceAddress address, std::uint64_t size, const std::vector<Device>& devices) = 0;
  // pre: whole mappings; see the laws.
  virtual Status unmap(DeviceAddress address, std::uint64_t size) = 0;
  // A new descriptor, owned by the caller. pre: created exportable.
  virtual Result<int> export_fd(PhysicalHandle handle) = 0;
  // A handle on the same pages; `fd` stays the caller's. size: what the exporter created.
  virtual Result<PhysicalHandle> import_fd(int fd, std::uint64_t size) = 0;

  // --- host memory ---
  // Page-locks [host, host + size) for copies. pre: mapped, populated, not registered. kUnsupported or
  // kOutOfHostMemory when pinning is refused: the memory then still works, pageable.
  virtual Status register_host(void* host, std::uint64_t size) = 0;
  virtual Status unregister_host(void* host) = 0;

  // --- streams, events, copies: all asynchronous, ordered within a stream ---
  virtual Result<StreamHandle> create_stream(Device device) = 0;  // does not synchronise with other streams
  virtual Status destroy_stream(StreamHandle stream) = 0;         // work already queued still runs
  virtual Result<EventHandle> create_event(Device device) = 0;
  virtual Status destroy_event(EventHandle event) = 0;
  virtual Status record_event(EventHandle event, StreamHandle stream) = 0;
  // true: all work before the last record is done. Never blocks. Errors of that work surface here.
  virtual Result<bool> query_event(EventHandle event) = 0;
  // The host range lies in one registration, or in none at all: it never crosses into or out of one.
  virtual Status copy_to_host(void* host, DeviceAddress device, std::uint64_t size, StreamHandle stream) = 0;
  virtual Status copy_to_device(DeviceAddress device, const void* host, std::uint64_t size, StreamHandle stream) = 0;
  virtual Status fill(DeviceAddress device, std::uint8_t byte, std::uint64_t size, StreamHandle stream) = 0;

  // --- waits ---
  // Blocks until all work of the device's context is done, whoever queued it. Has no deadline of its own: see
  // DeviceWaiter. Errors of that work surface here. Beside a capture it may fail, and end the capture.
  virtual Status synchronize(Device device) = 0;

  // The same wait in the way that freeing memory waits: it leaves captures alone, but may hold up other threads'
  // launches.
  virtual Status fence(Device device) { return synchronize(device); }

  // Whether the stream with this native handle (0: the default stream) is being captured into a graph, or cannot be
  // asked because another capture forbids it.
  [[nodiscard]] virtual bool is_capturing(std::uint64_t native_stream) {
    (void)native_stream;
    return false;
  }
};

}  // namespace cumem
