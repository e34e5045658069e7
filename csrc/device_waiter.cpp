#include "device_waiter.h"

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <string>
#include <thread>

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
  bool inside = false;  // in the driver
  Status status;        // of round `done`
  std::thread thread;

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      wake.wait(lock, [this] { return stop || asked > done; });
      if (stop) return;
      const std::uint64_t round = asked;
      inside = true;
      lock.unlock();
      Status result = driver->synchronize(device);
      lock.lock();
      inside = false;
      status = std::move(result);
      done = round;
      finished.notify_all();
    }
  }
};

DeviceWaiter::DeviceWaiter(std::shared_ptr<Driver> driver, std::chrono::duration<double> timeout)
    : driver_(std::move(driver)), timeout_(timeout) {}

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

std::shared_ptr<DeviceWaiter::Worker> DeviceWaiter::worker(Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Worker>& slot = workers_[device];
  if (!slot) {
    slot = std::make_shared<Worker>();
    slot->driver = driver_;
    slot->device = device;
    slot->thread = std::thread([shared = slot] { shared->run(); });
  }
  return slot;
}

Status DeviceWaiter::wait(Device device) {
  const std::shared_ptr<Worker> held = worker(device);
  std::unique_lock<std::mutex> lock(held->mutex);
  const std::uint64_t ticket = ++held->asked;
  held->wake.notify_one();
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  if (!held->finished.wait_until(lock, deadline, [&] { return held->done >= ticket; })) {
    return Status(
        Code::kBusy, "synchronize",
        "device " + std::to_string(device.ordinal) + " still works after " + std::to_string(timeout_.count()) + " s");
  }
  return held->status;
}

Status DeviceWaiter::wait(const std::vector<Device>& devices) {
  std::vector<Device> distinct = devices;
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  for (const Device device : distinct) CUMEM_RETURN_IF_ERROR(wait(device));
  return {};
}

}  // namespace cumem
