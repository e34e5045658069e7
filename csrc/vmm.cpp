#include "vmm.h"

#include <utility>

#include "process.h"

namespace cumem {

Result<PhysicalMemory> PhysicalMemory::create(std::shared_ptr<Driver> driver, std::uint64_t size,
                                              const AllocationProperties& properties) {
  Result<PhysicalHandle> handle = driver->create(size, properties);
  if (!handle.ok()) return handle.status();
  PhysicalMemory memory;
  memory.driver_ = std::move(driver);
  memory.handle_ = handle.value();
  memory.size_ = size;
  return memory;
}

PhysicalMemory::PhysicalMemory(PhysicalMemory&& other) noexcept
    : driver_(std::move(other.driver_)), handle_(other.handle_), size_(other.size_) {
  other.driver_.reset();
}

PhysicalMemory& PhysicalMemory::operator=(PhysicalMemory&& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(handle_, other.handle_);
  std::swap(size_, other.size_);
  return *this;
}

PhysicalMemory::~PhysicalMemory() {
  if (may_call_driver()) (void)close();
}

Status PhysicalMemory::close() {
  if (empty()) return {};
  CUMEM_RETURN_IF_ERROR(driver_->release(handle_));
  driver_.reset();
  return {};
}

Result<AddressRange> AddressRange::reserve(std::shared_ptr<Driver> driver, std::uint64_t size) {
  Result<DeviceAddress> address = driver->reserve(size);
  if (!address.ok()) return address.status();
  AddressRange range;
  range.driver_ = std::move(driver);
  range.address_ = address.value();
  range.size_ = size;
  return range;
}

AddressRange::AddressRange(AddressRange&& other) noexcept
    : driver_(std::move(other.driver_)), address_(other.address_), size_(other.size_) {
  other.driver_.reset();
}

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(address_, other.address_);
  std::swap(size_, other.size_);
  return *this;
}

AddressRange::~AddressRange() {
  if (may_call_driver()) (void)close();
}

Status AddressRange::close() {
  if (empty()) return {};
  CUMEM_RETURN_IF_ERROR(driver_->address_free(address_, size_));
  driver_.reset();
  return {};
}

Result<Mapping> Mapping::map(std::shared_ptr<Driver> driver, DeviceAddress address, PhysicalMemory& memory) {
  Status status = driver->map(address, memory.size(), memory.handle());
  if (!status.ok()) return status;
  Mapping mapping;
  mapping.driver_ = std::move(driver);
  mapping.memory_ = std::move(memory);
  mapping.address_ = address;
  mapping.mapped_ = true;
  return mapping;
}

Mapping::Mapping(Mapping&& other) noexcept
    : driver_(std::move(other.driver_)),
      memory_(std::move(other.memory_)),
      address_(other.address_),
      mapped_(std::exchange(other.mapped_, false)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(driver_, other.driver_);
  std::swap(memory_, other.memory_);
  std::swap(address_, other.address_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

Mapping::~Mapping() {
  if (may_call_driver()) (void)close();
}

Status Mapping::set_access(const std::vector<Device>& devices) {
  return driver_->set_access(address_, memory_.size(), devices);
}

Status Mapping::close() {
  if (mapped_) {
    CUMEM_RETURN_IF_ERROR(driver_->unmap(address_, memory_.size()));
    mapped_ = false;
  }
  return memory_.close();
}

}  // namespace cumem
