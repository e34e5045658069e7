// FaultyDriver: any driver, with a log of its calls, faults on order, and gates to hold calls at.
//
// What is called a call here: every method that returns a Status or a Result, under the method's name ("create", "map",
// ...), but not the questions properties and can_access_peer. Each call is logged, counted and given its verdict in one
// step; then it stands at its gate if that is held; then it fails or goes on to the inner driver. A call that is made
// to fail never reaches the inner driver: nothing changes there.
//
// Threads: any. The own mutex is never held while the inner driver works or a call stands at a gate. Whoever destroys
// the object has released the gates and waited for the calls.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "driver.h"

namespace cumem {

class FaultyDriver final : public Driver {
 public:
  static constexpr std::int64_t kForever = -1;

  explicit FaultyDriver(std::shared_ptr<Driver> inner) : inner_(std::move(inner)) {}

  [[nodiscard]] const std::shared_ptr<Driver>& inner() const { return inner_; }

  // Names of the calls since `clear`, in order of arrival; failed ones too.
  [[nodiscard]] std::vector<std::string> calls() const;
  // How many calls were made to fail since `clear`.
  [[nodiscard]] std::uint64_t failed() const;
  // Makes call number `call` from now (0: the next; counting only calls named `only`, if given) and the times - 1
  // counted ones after it fail with `code`; kForever: all after it. Replaces the fault set before. Once a
  // kContextBroken was given, every call of any name fails with it until `clear`, as after a real one. Out-of-memory
  // codes carry numbers: needed_bytes is what the call asked for, free_bytes less. kInvalidValue, nothing changed: call
  // < 0, times neither positive nor kForever, code kOk, `only` is no call's name.
  Status fail_at(std::int64_t call, Code code, std::int64_t times = 1, std::optional<std::string> only = std::nullopt);
  // Forgets the log, the fault and a broken context. Gates stay as they are.
  void clear();

  // Makes every call of that name wait until `release_gate`. kInvalidValue if `call` is no call's name.
  Status hold(const std::string& call);
  // Opens the gate for those that wait and those that come. No effect when it is open.
  void release_gate(const std::string& call);
  // Blocks until a call stands at the gate: true; false after `timeout` without one.
  [[nodiscard]] bool wait_held(const std::string& call, std::chrono::duration<double> timeout);

  [[nodiscard]] std::string name() const override { return inner_->name(); }
  [[nodiscard]] MemoryKind memory_kind() const override { return inner_->memory_kind(); }
  [[nodiscard]] DriverCounts counts() const override { return inner_->counts(); }
  [[nodiscard]] int device_count() override { return inner_->device_count(); }
  Result<DeviceProperties> properties(Device device) override { return inner_->properties(device); }
  Result<bool> can_access_peer(Device from, Device to) override { return inner_->can_access_peer(from, to); }

  Result<MemoryInfo> memory_info(Device device) override;
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
  [[nodiscard]] bool is_capturing(std::uint64_t native_stream) override { return inner_->is_capturing(native_stream); }

 private:
  struct Fault {
    std::int64_t calls_before;  // counted ones still to come before it fires
    Code code;
    std::int64_t times;  // counted ones still to fail; kForever
    std::optional<std::string> only;
  };
  struct Gate {
    bool held = false;
    int waiting = 0;             // calls that stand at it
    std::uint64_t openings = 0;  // what they wait for: another opening, even if it is held again at once
  };

  // Logs, judges and holds one call. `size`: the bytes it asks for, 0 if it asks for none.
  Status arrive(const char* call, std::uint64_t size = 0);
  std::optional<Code> judge(const std::string& call);
  void stand_at_gate(const std::string& call, std::unique_lock<std::mutex>& lock);

  const std::shared_ptr<Driver> inner_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> log_;
  std::optional<Fault> fault_;
  bool broken_ = false;
  std::uint64_t failed_ = 0;
  std::map<std::string, Gate> gates_;
};

}  // namespace cumem
