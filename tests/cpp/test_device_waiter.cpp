// Waits with a deadline: what they cover, what happens to one that the device lets down.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <iostream>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device_waiter.h"
#include "driver/faulty_driver.h"
#include "driver/host_driver.h"
#include "driver_helpers.h"
#include "forwarding_driver.h"

namespace cumem::testing {
namespace {

using Seconds = std::chrono::duration<double>;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kGranule = 64 * kKiB;
constexpr Seconds kLong{30};
constexpr Seconds kShort{0.05};

std::shared_ptr<HostDriver> make_host() {
  HostDriverOptions options;
  options.device_bytes = 4 * kMiB;
  options.granularity_bytes = kGranule;
  return must(HostDriver::create(options));
}

std::shared_ptr<FaultyDriver> make() { return std::make_shared<FaultyDriver>(make_host()); }

std::int64_t waits(const FaultyDriver& driver) {
  const auto calls = driver.calls();
  return std::count(calls.begin(), calls.end(), "synchronize");
}

// Until nobody but the caller holds the driver: detached threads have ended.
bool becomes_unshared(const std::shared_ptr<FaultyDriver>& driver) {
  for (const auto until = Clock::now() + kLong; Clock::now() < until; std::this_thread::yield()) {
    if (driver.use_count() == 1) return true;
  }
  return false;
}

// Lets one wait through for each admission; the others stand at it. Devices but the first pass freely.
class Turnstile : public ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;
  Status synchronize(Device device) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (device == kFirst) {
      ++arrived_;
      changed_.notify_all();
      changed_.wait(lock, [this] { return admitted_ > 0; });
      --admitted_;
    }
    lock.unlock();
    return ForwardingDriver::synchronize(device);
  }
  void admit(int count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    admitted_ += count;
    changed_.notify_all();
  }
  // Whether so many have come in all, before a long time is over.
  bool wait_arrived(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kLong, [&] { return arrived_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  int admitted_ = 0;
};

}  // namespace

TEST_CASE("after_a_wait_all_work_queued_before_it_is_done") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  const Memory memory(*driver, kGranule);
  const Stream stream(*driver);
  Bytes bytes(8);
  for (std::uint8_t round = 1; round < 5; ++round) {
    CHECK_OK(driver->fill(memory.at(), round, 8, stream.get()));
    CHECK_OK(driver->copy_to_host(bytes.data(), memory.at(), 8, stream.get()));
    CHECK_OK(waiter.wait(kFirst));
    CHECK(bytes == Bytes(8, round));
  }
}

TEST_CASE("errors_of_the_devices_work_surface_in_the_wait_and_do_not_stay") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  CHECK_OK(waiter.wait(kFirst));
  REQUIRE_OK(driver->fail_at(0, Code::kDriver, 1, "synchronize"));
  CHECK_CODE(kDriver, waiter.wait(kFirst));
  CHECK_OK(waiter.wait(kFirst));
  CHECK_REFUSED(waiter.wait(Device{7}));
}

TEST_CASE("a_wait_beside_a_capture_is_the_drivers_fence") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  CHECK_OK(waiter.wait(kFirst, true));
  CHECK_OK(waiter.wait({kFirst, kSecond}, true));
  CHECK(driver->calls() == std::vector<std::string>{"fence", "fence", "fence"});
  CHECK_OK(waiter.wait(kFirst));
  CHECK(waits(*driver) == 1);  // the next one no longer is
}

TEST_CASE("a_wait_covers_each_device_once") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  CHECK_OK(waiter.wait(std::vector<Device>{}));
  CHECK(waits(*driver) == 0);
  CHECK_OK(waiter.wait({kSecond, kFirst, kSecond}));
  CHECK(waits(*driver) == 2);
}

TEST_CASE("a_wait_for_a_device_that_still_works_is_busy_at_its_deadline") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kShort);
  CHECK(waiter.timeout() == kShort);
  REQUIRE_OK(driver->hold("synchronize"));
  const auto before = Clock::now();
  const Status status = waiter.wait(kFirst);
  CHECK_CODE(kBusy, status);
  CHECK(Seconds(Clock::now() - before) >= kShort);
  CHECK(status.message().find("device 0") != std::string::npos);
  driver->release_gate("synchronize");
}

TEST_CASE("a_wait_that_timed_out_leaves_one_call_in_the_driver_and_the_next_wait_begins_after_it") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kShort);
  REQUIRE_OK(driver->hold("synchronize"));
  CHECK_CODE(kBusy, waiter.wait(kFirst));
  CHECK_CODE(kBusy, waiter.wait(kFirst));
  CHECK(waits(*driver) == 1);  // the second one never reached the driver
  driver->release_gate("synchronize");
  Status status(Code::kBusy, "", "");
  for (int i = 0; i < 600 && status.code() == Code::kBusy; ++i) status = waiter.wait(kFirst);
  CHECK_OK(status);
  CHECK(waits(*driver) >= 2);
}

TEST_CASE("a_failure_that_comes_after_the_deadline_is_not_the_next_waits_failure") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kShort);
  REQUIRE_OK(driver->hold("synchronize"));
  REQUIRE_OK(driver->fail_at(0, Code::kDriver, 1, "synchronize"));
  CHECK_CODE(kBusy, waiter.wait(kFirst));
  driver->release_gate("synchronize");
  Status status(Code::kBusy, "", "");
  for (int i = 0; i < 600 && status.code() == Code::kBusy; ++i) status = waiter.wait(kFirst);
  CHECK_OK(status);
}

TEST_CASE("a_driver_wait_that_began_earlier_never_answers_for_a_later_one") {
  const auto driver = std::make_shared<Turnstile>(make_host());
  DeviceWaiter waiter(driver, kLong);
  std::atomic<bool> second_done{false};
  std::thread first([&] { CHECK_OK(waiter.wait(kFirst)); });
  CHECK(driver->wait_arrived(1));
  std::thread second([&] {
    CHECK_OK(waiter.wait(kFirst));
    second_done = true;
  });
  driver->admit(1);
  first.join();
  CHECK(driver->wait_arrived(2));
  CHECK_FALSE(second_done.load());
  driver->admit(1);
  second.join();
}

TEST_CASE("a_stuck_device_holds_up_no_other") {
  const auto driver = std::make_shared<Turnstile>(make_host());
  DeviceWaiter waiter(driver, kShort);
  CHECK_CODE(kBusy, waiter.wait(kFirst));
  CHECK_OK(waiter.wait(kSecond));
  CHECK_CODE(kBusy, waiter.wait({kSecond, kFirst}));
  driver->admit(9);
}

TEST_CASE("many_threads_wait_at_once_and_share_driver_waits") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) bad += waiter.wait(Device{t % 2}).ok() ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(bad.load() == 0);
  CHECK(waits(*driver) <= 400);
}

TEST_CASE("a_timeout_without_end_waits_and_a_timeout_of_nothing_does_not") {
  const auto driver = make();
  DeviceWaiter endless(driver, Seconds(std::numeric_limits<double>::infinity()));
  CHECK_OK(endless.wait(kFirst));
  DeviceWaiter longest(driver, Seconds(1e300));
  CHECK_OK(longest.wait(kFirst));
  REQUIRE_OK(driver->hold("synchronize"));
  DeviceWaiter impatient(driver, Seconds(0));
  CHECK_CODE(kBusy, impatient.wait(kFirst));
  DeviceWaiter negative(driver, Seconds(-std::numeric_limits<double>::infinity()));
  CHECK_CODE(kBusy, negative.wait(kFirst));
  driver->release_gate("synchronize");
}

TEST_CASE("a_waiter_ends_at_once_while_its_thread_is_stuck_in_the_driver") {
  const auto driver = make();
  REQUIRE_OK(driver->hold("synchronize"));
  {
    DeviceWaiter waiter(driver, kShort);
    CHECK_CODE(kBusy, waiter.wait(kFirst));
  }
  CHECK(driver.use_count() > 1);  // the thread is still there
  driver->release_gate("synchronize");
  CHECK(becomes_unshared(driver));
}

TEST_CASE("a_waiter_that_ends_takes_its_idle_threads_with_it") {
  const auto driver = make();
  {
    DeviceWaiter waiter(driver, kLong);
    CHECK_OK(waiter.wait({kFirst, kSecond}));
  }
  CHECK(driver.use_count() == 1);
}

TEST_CASE("a_forked_child_waits_for_nothing_and_ends_its_copy_of_a_waiter") {
  const auto driver = make();
  auto waiter = std::make_unique<DeviceWaiter>(driver, kLong);
  CHECK_OK(waiter->wait(kFirst));
  std::cout.flush();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a wait for a thread that is not here would not end in time
    const bool refused = waiter->wait(kFirst).code() == Code::kDriver;
    waiter.reset();
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

}  // namespace cumem::testing
