// Lists of copies and fills: all bytes arrive, in chunks and windows, and after an error nothing is in flight.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver/faulty_driver.h"
#include "driver/host_driver.h"
#include "driver_helpers.h"
#include "forwarding_driver.h"
#include "transfer.h"

namespace cumem::testing {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr std::uint64_t kGranule = 64 * kKiB;
constexpr Seconds kLong{30};
constexpr Seconds kShort{0.05};

std::shared_ptr<HostDriver> make_host(std::uint64_t device_bytes = 16 * kMiB) {
  HostDriverOptions options;
  options.device_bytes = device_bytes;
  options.granularity_bytes = kGranule;
  return must(HostDriver::create(options));
}

std::shared_ptr<FaultyDriver> make() { return std::make_shared<FaultyDriver>(make_host()); }

Move to_host(DeviceAddress address, Bytes& bytes, Device device = kFirst) {
  return {Move::Kind::kToHost, device, address, reinterpret_cast<std::byte*>(bytes.data()), bytes.size(), 0};
}

Move to_device(DeviceAddress address, Bytes& bytes, Device device = kFirst) {
  Move move = to_host(address, bytes, device);
  move.kind = Move::Kind::kToDevice;
  return move;
}

Move fill(DeviceAddress address, std::uint64_t size, std::uint8_t byte, Device device = kFirst) {
  return {Move::Kind::kFill, device, address, nullptr, size, byte};
}

constexpr std::int64_t kRecorded = 0;
constexpr std::int64_t kNotYet = -1;
constexpr std::int64_t kReached = -2;

// What was asked of the driver, in order: sizes of work, and the events.
class Recorder : public ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;
  Status copy_to_host(void* host, DeviceAddress device, std::uint64_t size, StreamHandle stream) override {
    note(static_cast<std::int64_t>(size));
    return ForwardingDriver::copy_to_host(host, device, size, stream);
  }
  Status fill(DeviceAddress device, std::uint8_t byte, std::uint64_t size, StreamHandle stream) override {
    note(static_cast<std::int64_t>(size));
    return ForwardingDriver::fill(device, byte, size, stream);
  }
  Status record_event(EventHandle event, StreamHandle stream) override {
    note(kRecorded);
    return ForwardingDriver::record_event(event, stream);
  }
  Result<bool> query_event(EventHandle event) override {
    if (stuck_) return false;
    auto reached = ForwardingDriver::query_event(event);
    note(reached.ok() && reached.value() ? kReached : kNotYet);
    return reached;
  }

  std::vector<std::int64_t> taken() { return std::exchange(notes_, {}); }
  void set_stuck(bool stuck) { stuck_ = stuck; }

 private:
  void note(std::int64_t what) { notes_.push_back(what); }
  std::vector<std::int64_t> notes_;
  bool stuck_ = false;
};

std::vector<std::int64_t> sizes_only(std::vector<std::int64_t> notes) {
  notes.erase(std::remove_if(notes.begin(), notes.end(), [](std::int64_t note) { return note <= 0; }), notes.end());
  return notes;
}

}  // namespace

TEST_CASE("an_empty_list_is_done_at_once") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  Transfer transfer(driver, waiter);
  CHECK_OK(transfer.run({}));
  CHECK(driver->calls().empty());
  CHECK(transfer.progress().total_bytes == 0);
}

TEST_CASE("copies_and_fills_of_a_list_run_in_its_order_and_are_done_on_return") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  Transfer transfer(driver, waiter);
  const Memory memory(*driver, kGranule);
  Bytes up = pattern(1000);
  Bytes first(kGranule), second(kGranule);
  CHECK_OK(transfer.run({fill(memory.at(), kGranule, 1), to_host(memory.at(), first), to_device(memory.at(24), up),
                         to_host(memory.at(), second)}));
  CHECK(first == Bytes(kGranule, 1));
  Bytes expected(kGranule, 1);
  std::copy(up.begin(), up.end(), expected.begin() + 24);
  CHECK(second == expected);
  CHECK(transfer.progress().done_bytes == 3 * kGranule + 1000);
  CHECK(transfer.progress().total_bytes == 3 * kGranule + 1000);
}

TEST_CASE("a_lane_is_made_once_and_ends_with_the_transfer") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  {
    const Memory memory(*driver, kGranule);
    Transfer transfer(driver, waiter);
    CHECK(driver->counts().streams == 0);
    for (int i = 0; i < 3; ++i) CHECK_OK(transfer.run({fill(memory.at(), 8, 1)}));
    CHECK(driver->counts().streams == 1);
    CHECK(driver->counts().events == 4);
  }
  CHECK(driver->counts() == DriverCounts{});
}

// --- chunks and windows ---

TEST_CASE("large_moves_are_cut_into_chunks_of_64_MiB") {
  const auto host = make_host(192 * kMiB);
  const auto driver = std::make_shared<Recorder>(host);
  DeviceWaiter waiter(driver, kLong);
  Transfer transfer(driver, waiter);
  const std::uint64_t size = 128 * kMiB + kGranule + 3;
  const Memory memory(*driver, 192 * kMiB);
  Bytes bytes(size);
  CHECK_OK(transfer.run({fill(memory.at(), size, 7), fill(memory.at(64 * kMiB - 1), 2, 8),
                         fill(memory.at(size - 1), 1, 9), to_host(memory.at(), bytes)}));
  const auto chunk = static_cast<std::int64_t>(64 * kMiB);
  const auto rest = static_cast<std::int64_t>(kGranule + 3);
  CHECK(sizes_only(driver->taken()) == std::vector<std::int64_t>{chunk, chunk, rest, 2, 1, chunk, chunk, rest});
  Bytes expected(size, 7);
  expected[64 * kMiB - 1] = expected[64 * kMiB] = 8;
  expected[size - 1] = 9;
  CHECK((bytes == expected));  // not printed: it is large
}

TEST_CASE("no_more_than_four_batches_are_in_flight") {
  const auto driver = std::make_shared<Recorder>(make_host());
  DeviceWaiter waiter(driver, kLong);
  Transfer transfer(driver, waiter);
  const Memory memory(*driver, kGranule);
  const std::vector<Move> moves(10 * 256, fill(memory.at(), 8, 1));
  CHECK_OK(transfer.run(moves));
  std::int64_t in_flight = 0, most = 0, batch = 0, batches = 0;
  for (const std::int64_t note : driver->taken()) {
    batch += note > 0 ? 1 : 0;
    in_flight -= note == kReached ? 1 : 0;
    if (note != kRecorded) continue;
    CHECK(std::exchange(batch, 0) == 256);
    ++batches;
    most = std::max(most, ++in_flight);
  }
  CHECK(batches == 10);
  CHECK(most == 4);
  CHECK(in_flight == 0);
}

TEST_CASE("many_small_moves_share_an_event_by_256") {
  const auto driver = std::make_shared<Recorder>(make_host());
  DeviceWaiter waiter(driver, kLong);
  Transfer transfer(driver, waiter);
  const Memory memory(*driver, kGranule);
  std::vector<Bytes> parts(1000, Bytes(64));
  std::vector<Move> moves;
  write(*driver, memory.at(), pattern(kGranule));
  static_cast<void>(driver->taken());
  for (std::size_t i = 0; i < parts.size(); ++i) moves.push_back(to_host(memory.at(64 * i), parts[i]));
  CHECK_OK(transfer.run(moves));
  const std::vector<std::int64_t> notes = driver->taken();
  CHECK(std::count(notes.begin(), notes.end(), kRecorded) == 4);
  const Bytes whole = pattern(kGranule);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(64 * i);
    REQUIRE(parts[i] == Bytes(begin, begin + 64));
  }
  CHECK(transfer.progress().done_bytes == 64 * 1000);
}

TEST_CASE("progress_can_be_seen_while_a_run_goes_on") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  Transfer transfer(driver, waiter);
  const Memory memory(*driver, kGranule);
  REQUIRE_OK(driver->hold("query_event"));
  std::thread runner([&] { CHECK_OK(transfer.run({fill(memory.at(), 8, 1), fill(memory.at(), 24, 2)})); });
  CHECK(driver->wait_held("query_event", kLong));
  CHECK(transfer.progress().done_bytes == 0);
  CHECK(transfer.progress().total_bytes == 32);
  driver->release_gate("query_event");
  runner.join();
  CHECK(transfer.progress().done_bytes == 32);
}

TEST_CASE("runs_of_several_threads_wait_for_each_other") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  Transfer transfer(driver, waiter);
  const Memory memory(*driver, 4 * kGranule);
  std::vector<std::thread> threads;
  std::atomic<int> bad{0};
  for (std::uint8_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Bytes bytes(100);
      for (int i = 0; i < 20; ++i) {
        const DeviceAddress mine = memory.at(t * kGranule);
        const bool good = transfer.run({fill(mine, 100, t), to_host(mine, bytes)}).ok() && bytes == Bytes(100, t);
        bad += good ? 0 : 1;
        static_cast<void>(transfer.progress());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(bad.load() == 0);
}

// --- two devices ---

TEST_CASE("moves_of_two_devices_run_on_lanes_of_their_own") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  Transfer transfer(driver, waiter);
  const Memory first(*driver, kGranule, kFirst);
  const Memory second(*driver, kGranule, kSecond);
  Bytes a(100), b(100);
  CHECK_OK(transfer.run({fill(second.at(), 100, 2, kSecond), fill(first.at(), 100, 1, kFirst),
                         to_host(second.at(), b, kSecond), to_host(first.at(), a, kFirst)}));
  CHECK(a == Bytes(100, 1));
  CHECK(b == Bytes(100, 2));
  CHECK(driver->counts().streams == 2);
}

TEST_CASE("a_device_that_does_not_exist_fails_the_list_before_any_work") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  Transfer transfer(driver, waiter);
  const Memory memory(*driver, kGranule);
  Bytes bytes(8);
  driver->clear();
  CHECK_REFUSED(transfer.run({fill(memory.at(), 8, 1), fill(memory.at(), 8, 2, Device{7})}));
  const auto calls = driver->calls();
  CHECK(std::count(calls.begin(), calls.end(), "fill") == 0);
  CHECK_OK(transfer.run({to_host(memory.at(), bytes)}));  // what was listed is forgotten
  CHECK(bytes == Bytes(8, kFreshPoison));
}

// --- failures ---

namespace {

// One run over two devices with every kind of work. That nothing is in flight afterwards is shown by taking all memory
// away without a wait: late work would be an illegal access, which stays.
Status run_and_pull_the_memory_away(const std::shared_ptr<FaultyDriver>& driver, Transfer& transfer) {
  Status status;
  {
    const Memory first(*driver->inner(), 4 * kGranule, kFirst);
    const Memory second(*driver->inner(), kGranule, kSecond);
    Bytes a(4 * kGranule), b(kGranule), c = pattern(kGranule);
    const HostMemory pinned(kGranule);
    REQUIRE_OK(driver->inner()->register_host(pinned.at(), kGranule));
    Move into_pinned = to_host(first.at(), b);
    into_pinned.host = reinterpret_cast<std::byte*>(pinned.at());
    status = transfer.run({fill(first.at(), 4 * kGranule, 1), to_host(first.at(), a),
                           to_device(second.at(), c, kSecond), into_pinned, to_host(second.at(), b, kSecond)});
    if (status.code() == Code::kBusy) {  // the one code that says that something may be
      CHECK_OK(driver->inner()->synchronize(kFirst));
      CHECK_OK(driver->inner()->synchronize(kSecond));
    }
    if (status.ok()) {
      CHECK(a == Bytes(4 * kGranule, 1));
      CHECK(b == c);
    }
    REQUIRE_OK(driver->inner()->unregister_host(pinned.at()));
  }
  CHECK_OK(driver->inner()->synchronize(kFirst));
  CHECK_OK(driver->inner()->synchronize(kSecond));
  return status;
}

}  // namespace

TEST_CASE("whatever_call_fails_nothing_is_in_flight_and_the_next_run_works") {
  for (const std::int64_t times : {1, 2}) {
    int failures = 0;
    for (std::int64_t k = 0;; ++k) {
      CAPTURE(times);
      CAPTURE(k);
      const auto driver = make();
      {
        DeviceWaiter waiter(driver, kLong);
        Transfer transfer(driver, waiter);
        driver->clear();
        REQUIRE_OK(driver->fail_at(k, Code::kDriver, times));
        const Status status = run_and_pull_the_memory_away(driver, transfer);
        if (driver->failed() == 0) {
          CHECK_OK(status);
          break;
        }
        ++failures;
        CHECK_FALSE(status.ok());
        driver->clear();
        CHECK_OK(run_and_pull_the_memory_away(driver, transfer));
      }
      if (times == 1) CHECK(driver->counts() == DriverCounts{});
    }
    CHECK(failures > 20);
  }
}

TEST_CASE("a_failed_run_whose_device_stays_busy_says_so_and_later_runs_use_another_stream") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kShort);
  Transfer transfer(driver, waiter);
  const Memory memory(*driver, kGranule);
  Bytes kept(8), bytes(8);
  CHECK_OK(transfer.run({fill(memory.at(), 8, 1)}));
  REQUIRE_OK(driver->hold("synchronize"));
  REQUIRE_OK(driver->fail_at(0, Code::kDriver, 1, "query_event"));
  CHECK_CODE(kBusy, transfer.run({to_host(memory.at(), kept)}));
  driver->release_gate("synchronize");
  CHECK_OK(transfer.run({fill(memory.at(), 8, 2), to_host(memory.at(), bytes)}));
  CHECK(bytes == Bytes(8, 2));
  CHECK(driver->counts().streams == 1);
  CHECK(driver->counts().events == 4);
}

TEST_CASE("a_failed_run_whose_wait_fails_too_says_that_copies_may_be_in_flight") {
  const auto driver = make();
  DeviceWaiter waiter(driver, kLong);
  Transfer transfer(driver, waiter);
  const Memory memory(*driver, kGranule);
  Bytes kept(8);
  CHECK_OK(transfer.run({fill(memory.at(), 8, 1)}));
  REQUIRE_OK(driver->fail_at(1, Code::kDriver, FaultyDriver::kForever));  // the copy is queued, all after it fails
  CHECK_CODE(kBusy, transfer.run({to_host(memory.at(), kept)}));
  driver->clear();
}

TEST_CASE("copies_that_never_end_are_busy_at_a_deadline_that_counts_from_the_last_progress") {
  const auto driver = std::make_shared<Recorder>(make_host());
  DeviceWaiter waiter(driver, kShort);
  Transfer transfer(driver, waiter);
  const Memory memory(*driver, kGranule);
  driver->set_stuck(true);
  const auto before = std::chrono::steady_clock::now();
  const Status status = transfer.run({fill(memory.at(), 8, 1)});
  CHECK_CODE(kBusy, status);
  CHECK(Seconds(std::chrono::steady_clock::now() - before) >= kShort);
  CHECK(status.call() == "copy");
  driver->set_stuck(false);
  CHECK_OK(transfer.run({fill(memory.at(), 8, 1)}));
}

TEST_CASE("an_illegal_access_of_a_list_is_a_broken_context") {
  const auto host = make_host();
  DeviceWaiter waiter(host, kLong);
  Transfer transfer(host, waiter);
  const DeviceAddress nothing_mapped = must(host->reserve(kGranule));
  CHECK_CODE(kContextBroken, transfer.run({fill(nothing_mapped, 8, 1)}));
  CHECK_CODE(kContextBroken, transfer.run({fill(nothing_mapped, 8, 1)}));
}

}  // namespace cumem::testing
