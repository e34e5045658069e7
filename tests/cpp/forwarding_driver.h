// A driver that passes every call on: the base of test doubles that change one of them.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "driver/driver.h"

namespace cumem::testing {

class ForwardingDriver : public Driver {
 public:
  explicit ForwardingDriver(std::shared_ptr<Driver> inner) : inner_(std::move(inner)) {}

  [[nodiscard]] std::string name() const override { return inner_->name(); }
  [[nodiscard]] MemoryKind memory_kind() const override { return inner_->memory_kind(); }
  [[nodiscard]] DriverCounts counts() const override { return inner_->counts(); }
  [[nodiscard]] int device_count() override { return inner_->device_count(); }
  Result<DeviceProperties> properties(Device device) override { return inner_->properties(device); }
  Result<MemoryInfo> memory_info(Device device) override { return inner_->memory_info(device); }
  Result<bool> can_access_peer(Device from, Device to) override { return inner_->can_access_peer(from, to); }

  Result<DeviceAddress> reserve(std::uint64_t size) override { return inner_->reserve(size); }
  Status address_free(DeviceAddress address, std::uint64_t size) override {
    return inner_->address_free(address, size);
  }
  Result<PhysicalHandle> create(std::uint64_t size, const AllocationProperties& properties) override {
    return inner_->create(size, properties);
  }
  Status release(PhysicalHandle handle) override { return inner_->release(handle); }
  Status map(DeviceAddress address, std::uint64_t size, PhysicalHandle handle) override {
    return inner_->map(address, size, handle);
  }
  Status set_access(DeviceAddress address, std::uint64_t size, const std::vector<Device>& devices) override {
    return inner_->set_access(address, size, devices);
  }
  Status unmap(DeviceAddress address, std::uint64_t size) override { return inner_->unmap(address, size); }
  Result<int> export_fd(PhysicalHandle handle) override { return inner_->export_fd(handle); }
  Result<PhysicalHandle> import_fd(int fd, std::uint64_t size) override { return inner_->import_fd(fd, size); }

  Status register_host(void* host, std::uint64_t size) override { return inner_->register_host(host, size); }
  Status unregister_host(void* host) override { return inner_->unregister_host(host); }

  Result<StreamHandle> create_stream(Device device) override { return inner_->create_stream(device); }
  Status destroy_stream(StreamHandle stream) override { return inner_->destroy_stream(stream); }
  Result<EventHandle> create_event(Device device) override { return inner_->create_event(device); }
  Status destroy_event(EventHandle event) override { return inner_->destroy_event(event); }
  Status record_event(EventHandle event, StreamHandle stream) override { return inner_->record_event(event, stream); }
  Result<bool> query_event(EventHandle event) override { return inner_->query_event(event); }
  Status copy_to_host(void* host, DeviceAddress device, std::uint64_t size, StreamHandle stream) override {
    return inner_->copy_to_host(host, device, size, stream);
  }
  Status copy_to_device(DeviceAddress device, const void* host, std::uint64_t size, StreamHandle stream) override {
    return inner_->copy_to_device(device, host, size, stream);
  }
  Status fill(DeviceAddress device, std::uint8_t byte, std::uint64_t size, StreamHandle stream) override {
    return inner_->fill(device, byte, size, stream);
  }
  Status synchronize(Device device) override { return inner_->synchronize(device); }
  Status fence(Device device) override { return inner_->fence(device); }
  [[nodiscard]] bool is_capturing(std::uint64_t native_stream) override { return inner_->is_capturing(native_stream); }

 private:
  const std::shared_ptr<Driver> inner_;
};

}  // namespace cumem::testing
