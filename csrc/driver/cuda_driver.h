// CudaDriver: the contract over libcuda. With cuda_api.*, the only place that includes <cuda.h>.
//
// Uses each device's primary context, the one that torch and the CUDA runtime use; retained at first need and kept.
// Every call runs with that context pushed and the thread's capture mode relaxed, and puts both back.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "driver.h"

namespace cumem {

class CudaDriver : public Driver {
 public:
  // kUnsupported: no driver, too old a driver, or no device with virtual memory management.
  static Result<std::shared_ptr<CudaDriver>> create();
  ~CudaDriver() override;

  [[nodiscard]] std::string name() const override { return "cuda"; }
  [[nodiscard]] MemoryKind memory_kind() const override { return MemoryKind::kCuda; }
  [[nodiscard]] DriverCounts counts() const override;

  [[nodiscard]] int device_count() override { return device_count_; }
  Result<DeviceProperties> properties(Device device) override;
  Result<MemoryInfo> memory_info(Device device) override;
  Result<bool> can_access_peer(Device from, Device to) override;

  Result<DeviceAddress> reserve(std::uint64_t size) override;
  Status address_free(DeviceAddress address, std::uint64_t size) override;
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
  Status fence(Device device) override;
  [[nodiscard]] bool is_capturing(std::uint64_t native_stream) override;

 private:
  struct Impl;
  explicit CudaDriver(std::unique_ptr<Impl> impl, int device_count);

  std::unique_ptr<Impl> impl_;
  int device_count_ = 0;
};

}  // namespace cumem
