// PhysicalMemory, AddressRange, Mapping: the three driver objects behind a segment, as move-only owners.
//
// A Mapping owns the PhysicalMemory it shows, so that unmapping before releasing follows from the types. A segment
// holds its range before its mappings, so that pages go before addresses.
//
// Two ways to end: close() says what went wrong and may be called again; the destructor closes what is left, and what
// then still fails is leaked, never reused: better a leak than a dangling page. While the process is exiting
// destructors do nothing (see process.h).
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "driver/driver.h"

namespace cumem {

// Pages. Empty or owning exactly one handle.
class PhysicalMemory {
 public:
  PhysicalMemory() = default;
  static Result<PhysicalMemory> create(std::shared_ptr<Driver> driver, std::uint64_t size,
                                       const AllocationProperties& properties);
  PhysicalMemory(PhysicalMemory&& other) noexcept;
  PhysicalMemory& operator=(PhysicalMemory&& other) noexcept;
  ~PhysicalMemory();

  // Gives the pages back. After an error still owning.
  Status close();

  [[nodiscard]] bool empty() const { return driver_ == nullptr; }
  [[nodiscard]] PhysicalHandle handle() const { return handle_; }
  [[nodiscard]] std::uint64_t size() const { return size_; }

 private:
  std::shared_ptr<Driver> driver_;
  PhysicalHandle handle_;
  std::uint64_t size_ = 0;
};

// Reserved addresses. Empty or owning exactly one reservation.
class AddressRange {
 public:
  AddressRange() = default;
  static Result<AddressRange> reserve(std::shared_ptr<Driver> driver, std::uint64_t size);
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&& other) noexcept;
  ~AddressRange();

  // pre: nothing is mapped in it. After an error still owning.
  Status close();

  [[nodiscard]] bool empty() const { return driver_ == nullptr; }
  [[nodiscard]] DeviceAddress address() const { return address_; }
  [[nodiscard]] std::uint64_t size() const { return size_; }

 private:
  std::shared_ptr<Driver> driver_;
  DeviceAddress address_;
  std::uint64_t size_ = 0;
};

// Pages at an address. mapped => memory owned. A Mapping whose unmap succeeded but whose release failed is not mapped
// and still owns its memory: close() again releases it.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  // Takes `memory` and maps it at `address`. On an error `memory` is left to the caller, nothing is mapped.
  static Result<Mapping> map(std::shared_ptr<Driver> driver, DeviceAddress address, PhysicalMemory& memory);

  Status set_access(const std::vector<Device>& devices);

  // Unmaps, then releases. pre: no work in flight uses it. After an error call it again: it goes on where it stopped.
  Status close();

  // The pages of a mapping whose release failed. pre: !mapped().
  [[nodiscard]] PhysicalMemory take_memory() { return std::move(memory_); }

  [[nodiscard]] bool mapped() const { return mapped_; }
  [[nodiscard]] bool empty() const { return memory_.empty(); }  // closed, or its pages taken
  [[nodiscard]] std::uint64_t size() const { return memory_.size(); }

 private:
  std::shared_ptr<Driver> driver_;
  PhysicalMemory memory_;
  DeviceAddress address_;
  bool mapped_ = false;
};

}  // namespace cumem
