// DeviceWaiter: waits for a device with a deadline. The driver's own wait has none, so one thread a device does that
// and the caller waits for the thread.
//
// A wait that timed out leaves its thread inside the driver; the next wait begins after that one ends. A wait covers
// all work queued before it was called: a driver wait that had begun earlier never answers for it. At the end a thread
// that is stuck in the driver is detached, never joined.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "driver/driver.h"

namespace cumem {

class DeviceWaiter {
 public:
  DeviceWaiter(std::shared_ptr<Driver> driver, std::chrono::duration<double> timeout);
  ~DeviceWaiter();
  DeviceWaiter(const DeviceWaiter&) = delete;
  DeviceWaiter& operator=(const DeviceWaiter&) = delete;

  // kBusy at the deadline, which counts from the call. Errors of the device's work surface here. `beside_capture`: a
  // capture is known to be under way; wait by the driver's fence, which leaves it alone. kDriver at once in a fork.
  Status wait(Device device, bool beside_capture = false);
  Status wait(const std::vector<Device>& devices, bool beside_capture = false);

  [[nodiscard]] std::chrono::duration<double> timeout() const { return timeout_; }

 private:
  struct Worker;
  Result<std::shared_ptr<Worker>> worker(Device device);

  std::shared_ptr<Driver> driver_;
  std::chrono::duration<double> timeout_;
  std::mutex mutex_;
  std::map<Device, std::shared_ptr<Worker>> workers_;
};

}  // namespace cumem
