#include "device_waiter.h"

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "process.h"

namespace cumem {

// Shared by the waiter and its thread, so that a detached thread never touches freed memory.
//   done <= asked; a wait that drew ticket n may return once done >= n, with the status of that round.
struct DeviceWaiter::Worker {
  std::shared_ptr<Driver> driver;
  Device device;
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable finished;
  std::uint64_t asked = 0;
  std::uint64_t done = 0;
  bool stop = false;
  bool fence = false;   // some wait of the next round is beside a capture
  bool inside = false;  // in the driver
  Status status;        // of round `done`
  std::thread thread;

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      wake.wait(lock, [this] { return stop || asked > done; });
      if (stop) return;
      const std::uint64_t round = asked;
      const bool by_fence = std::exchange(fence, false);
      inside = true;
      lock.unlock();
      Status result = by_fence ? driver->fence(device) : driver->synchronize(device);
      lock.lock();
      inside = false;
      status = std::move(result);
      done = round;
      finished.notify_all();
    }
  }
};

namespace {

// Longer ones, endless ones too, leave the range of the clock; what is no number is no time.
std::chrono::duration<double> in_range(std::chrono::duration<double> timeout) {
  constexpr std::chrono::duration<double> kNone{0};
  constexpr std::chrono::duration<double> kYear = std::chrono::hours(365 * 24);
  return timeout > kNone ? std::min(timeout, kYear) : kNone;
}

}  // namespace

DeviceWaiter::DeviceWaiter(std::shared_ptr<Driver> driver, std::chrono::duration<double> timeout)
    : driver_(std::move(driver)), timeout_(in_range(timeout)) {}

DeviceWaiter::~DeviceWaiter() {
  for (auto& [device, worker] : workers_) {
    if (!may_call_driver()) {  // no lock either: a forked child may have copied it locked
      worker->thread.detach();
      continue;
    }
    bool inside = false;
    {
      const std::lock_guard<std::mutex> lock(worker->mutex);
      worker->stop = true;
      inside = worker->inside;
      worker->wake.notify_all();
    }
    if (inside) {
      worker->thread.detach();
    } else {
      worker->thread.join();
    }
  }
}

Result<std::shared_ptr<DeviceWaiter::Worker>> DeviceWaiter::worker(Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = workers_.find(device);
  if (known != workers_.end()) return known->second;
  const auto made = std::make_shared<Worker>();
  made->driver = driver_;
  made->device = device;
  try {
    made->thread = std::thread([made] { made->run(); });
  } catch (const std::system_error& error) {
    return Status(Code::kDriver, "synchronize", std::string("the system gives no thread: ") + error.what());
  }
  workers_.emplace(device, made);
  return made;
}

Status DeviceWaiter::wait(Device device, bool beside_capture) {
  if (is_forked_child()) {  // before any lock, which may have been copied locked; and no thread is here to answer
    return Status(Code::kDriver, "synchronize", "this is a fork of the process that uses the device");
  }
  const auto found = worker(device);
  if (!found.ok()) return found.status();
  const std::shared_ptr<Worker>& held = found.value();
  std::unique_lock<std::mutex> lock(held->mutex);
  const std::uint64_t ticket = ++held->asked;
  held->fence = held->fence || beside_capture;
  held->wake.notify_one();
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  if (!held->finished.wait_until(lock, deadline, [&] { return held->done >= ticket; })) {
    const double timeout_s = timeout_.count();
    return Status::busy(
        "synchronize",
        "device " + std::to_string(device.ordinal) + " still works after " + std::to_string(timeout_s) + " s",
        timeout_s);
  }
  return held->status;
}

Status DeviceWaiter::wait(const std::vector<Device>& devices, bool beside_capture) {
  std::vector<Device> distinct = devices;
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  for (const Device device : distinct) CUMEM_RETURN_IF_ERROR(wait(device, beside_capture));
  return {};
}

}  // namespace cumem
