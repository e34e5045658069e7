// What tests over a driver share: short ways to make memory, to move bytes, and to say "refused".
#pragma once

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <cstdint>
#include <ostream>
#include <vector>

#include "driver/driver.h"

namespace cumem {

inline std::ostream& operator<<(std::ostream& out, Code code) { return out << code_name(code); }

inline bool operator==(const DriverCounts& a, const DriverCounts& b) {
  return a.handles == b.handles && a.ranges == b.ranges && a.mappings == b.mappings &&
         a.registrations == b.registrations && a.streams == b.streams && a.events == b.events &&
         a.physical_bytes == b.physical_bytes;
}

}  // namespace cumem

namespace cumem::testing {

inline const Device kFirst{0};
inline const Device kSecond{1};

inline Code code_of(const Status& status) { return status.code(); }
template <typename T>
Code code_of(const Result<T>& result) {
  return result.status().code();
}

inline bool refused(Code code) { return code == Code::kInvalidValue || code == Code::kNotFound; }

#define CHECK_CODE(expected, ...) CHECK(::cumem::testing::code_of(__VA_ARGS__) == ::cumem::Code::expected)
#define CHECK_OK(...) CHECK_CODE(kOk, __VA_ARGS__)
#define REQUIRE_OK(...) REQUIRE(::cumem::testing::code_of(__VA_ARGS__) == ::cumem::Code::kOk)
#define REQUIRE_CODE(expected, ...) REQUIRE(::cumem::testing::code_of(__VA_ARGS__) == ::cumem::Code::expected)
#define CHECK_REFUSED(...) CHECK(::cumem::testing::refused(::cumem::testing::code_of(__VA_ARGS__)))

// The value of a result that must be there.
template <typename T>
T must(Result<T> result) {
  REQUIRE(code_of(result) == Code::kOk);
  return std::move(result).value();
}

inline std::uint64_t granularity(Driver& driver, Device device = kFirst) {
  return must(driver.properties(device)).granularity_bytes;
}
inline std::uint64_t free_bytes(Driver& driver, Device device = kFirst) {
  return must(driver.memory_info(device)).free_bytes;
}
// Exactly, unless other processes may use the device as well.
inline void check_free_bytes(Driver& driver, std::uint64_t expected, Device device = kFirst) {
  if (driver.memory_kind() == MemoryKind::kHost) CHECK(free_bytes(driver, device) == expected);
}
inline PhysicalHandle create(Driver& driver, std::uint64_t size, Device device = kFirst, bool exportable = false) {
  return must(driver.create(size, AllocationProperties{device, exportable, false}));
}

using Bytes = std::vector<std::uint8_t>;

// 0, 1, ... mixed so that neighbouring granules differ too.
inline Bytes pattern(std::uint64_t size, std::uint8_t seed = 0) {
  Bytes bytes(size);
  for (std::uint64_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(seed + i * 7 + (i >> 12));
  return bytes;
}

// A reservation; freed at the end.
class Range {
 public:
  Range(Driver& driver, std::uint64_t size) : driver_(driver), size_(size), address_(must(driver.reserve(size))) {}
  Range(const Range&) = delete;
  ~Range() { CHECK_OK(driver_.address_free(address_, size_)); }
  [[nodiscard]] DeviceAddress at(std::uint64_t offset = 0) const { return address_ + offset; }

 private:
  Driver& driver_;
  const std::uint64_t size_;
  const DeviceAddress address_;
};

// A range with one handle mapped over all of it, access for its device; all given back at the end.
class Memory {
 public:
  Memory(Driver& driver, std::uint64_t size, Device device = kFirst, bool exportable = false)
      : driver_(driver), size_(size), range_(driver, size), handle_(create(driver, size, device, exportable)) {
    REQUIRE_OK(driver.map(range_.at(), size, handle_));
    REQUIRE_OK(driver.set_access(range_.at(), size, {device}));
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    CHECK_OK(driver_.unmap(range_.at(), size_));
    CHECK_OK(driver_.release(handle_));
  }
  [[nodiscard]] DeviceAddress at(std::uint64_t offset = 0) const { return range_.at(offset); }
  [[nodiscard]] PhysicalHandle handle() const { return handle_; }

 private:
  Driver& driver_;
  const std::uint64_t size_;
  const Range range_;
  const PhysicalHandle handle_;
};

class Stream {
 public:
  explicit Stream(Driver& driver, Device device = kFirst)
      : driver_(driver), device_(device), handle_(must(driver.create_stream(device))) {}
  Stream(const Stream&) = delete;
  ~Stream() { CHECK_OK(driver_.destroy_stream(handle_)); }
  [[nodiscard]] StreamHandle get() const { return handle_; }
  void wait() const { CHECK_OK(driver_.synchronize(device_)); }

 private:
  Driver& driver_;
  const Device device_;
  const StreamHandle handle_;
};

inline Bytes read(Driver& driver, DeviceAddress address, std::uint64_t size, Device device = kFirst) {
  Bytes bytes(size);
  const Stream stream(driver, device);
  REQUIRE_OK(driver.copy_to_host(bytes.data(), address, size, stream.get()));
  stream.wait();
  return bytes;
}

inline void write(Driver& driver, DeviceAddress address, const Bytes& bytes, Device device = kFirst) {
  const Stream stream(driver, device);
  REQUIRE_OK(driver.copy_to_device(address, bytes.data(), bytes.size(), stream.get()));
  stream.wait();
}

// Page-aligned, populated host memory.
class HostMemory {
 public:
  explicit HostMemory(std::uint64_t size)
      : size_(size),
        data_(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0)) {
    REQUIRE(data_ != MAP_FAILED);
  }
  HostMemory(const HostMemory&) = delete;
  ~HostMemory() { munmap(data_, size_); }
  [[nodiscard]] std::uint8_t* at(std::uint64_t offset = 0) const { return static_cast<std::uint8_t*>(data_) + offset; }

 private:
  const std::uint64_t size_;
  void* const data_;
};

}  // namespace cumem::testing
