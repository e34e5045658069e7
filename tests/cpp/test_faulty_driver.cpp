// FaultyDriver: the log, faults on order, gates.
#include <atomic>
#include <chrono>
#include <thread>

#include "driver/faulty_driver.h"
#include "driver/host_driver.h"
#include "driver_conformance.h"
#include "driver_helpers.h"

namespace cumem::testing {
namespace {

constexpr std::uint64_t kGranule = 64 * kKiB;

std::shared_ptr<FaultyDriver> make() {
  HostDriverOptions options;
  options.device_bytes = 16 * kMiB;
  options.granularity_bytes = kGranule;
  return std::make_shared<FaultyDriver>(must(HostDriver::create(options)));
}

// The codes of `count` calls of memory_info.
std::vector<Code> codes(FaultyDriver& driver, int count) {
  std::vector<Code> seen;
  for (int i = 0; i < count; ++i) seen.push_back(code_of(driver.memory_info(kFirst)));
  return seen;
}

using Names = std::vector<std::string>;
constexpr Code kGood = Code::kOk;
constexpr Code kBad = Code::kDriver;

}  // namespace

TEST_CASE("a_faulty_driver_without_faults_keeps_the_laws") {
  const auto driver = make();
  for (const ConformanceCase& law : memory_cases()) {
    INFO(law.name);
    run_case(law, *driver);
  }
  for (const ConformanceCase& law : work_cases()) {
    INFO(law.name);
    run_case(law, *driver);
  }
  CHECK(driver->failed() == 0);
}

TEST_CASE("calls_are_logged_in_order_and_questions_are_not") {
  const auto driver = make();
  CHECK(driver->device_count() == 2);
  CHECK(must(driver->can_access_peer(kFirst, kSecond)));
  CHECK_OK(driver->properties(kFirst));
  CHECK(driver->name() == "host");
  CHECK(driver->memory_kind() == MemoryKind::kHost);
  const DeviceAddress address = must(driver->reserve(kGranule));
  CHECK_OK(driver->memory_info(kFirst));
  CHECK_OK(driver->address_free(address, kGranule));
  CHECK(driver->calls() == Names{"reserve", "memory_info", "address_free"});
  driver->clear();
  CHECK(driver->calls().empty());
}

TEST_CASE("every_call_is_logged_under_its_own_name") {
  const auto driver = make();
  const HostMemory host(kGranule);
  REQUIRE_OK(driver->fail_at(0, Code::kDriver, FaultyDriver::kForever));
  CHECK_CODE(kDriver, driver->memory_info(kFirst));
  CHECK_CODE(kDriver, driver->reserve(kGranule));
  CHECK_CODE(kDriver, driver->address_free({}, kGranule));
  CHECK_CODE(kDriver, driver->create(kGranule, {}));
  CHECK_CODE(kDriver, driver->release(PhysicalHandle(1)));
  CHECK_CODE(kDriver, driver->map({}, kGranule, PhysicalHandle(1)));
  CHECK_CODE(kDriver, driver->set_access({}, kGranule, {kFirst}));
  CHECK_CODE(kDriver, driver->unmap({}, kGranule));
  CHECK_CODE(kDriver, driver->export_fd(PhysicalHandle(1)));
  CHECK_CODE(kDriver, driver->import_fd(0, kGranule));
  CHECK_CODE(kDriver, driver->register_host(host.at(), kGranule));
  CHECK_CODE(kDriver, driver->unregister_host(host.at()));
  CHECK_CODE(kDriver, driver->create_stream(kFirst));
  CHECK_CODE(kDriver, driver->destroy_stream(StreamHandle(1)));
  CHECK_CODE(kDriver, driver->create_event(kFirst));
  CHECK_CODE(kDriver, driver->destroy_event(EventHandle(1)));
  CHECK_CODE(kDriver, driver->record_event(EventHandle(1), StreamHandle(1)));
  CHECK_CODE(kDriver, driver->query_event(EventHandle(1)));
  CHECK_CODE(kDriver, driver->copy_to_host(host.at(), {}, 8, StreamHandle(1)));
  CHECK_CODE(kDriver, driver->copy_to_device({}, host.at(), 8, StreamHandle(1)));
  CHECK_CODE(kDriver, driver->fill({}, 0, 8, StreamHandle(1)));
  CHECK_CODE(kDriver, driver->synchronize(kFirst));
  CHECK_CODE(kDriver, driver->fence(kFirst));
  CHECK(driver->calls() ==
        Names{"memory_info",   "reserve",        "address_free", "create",        "release",       "map",
              "set_access",    "unmap",          "export_fd",    "import_fd",     "register_host", "unregister_host",
              "create_stream", "destroy_stream", "create_event", "destroy_event", "record_event",  "query_event",
              "copy_to_host",  "copy_to_device", "fill",         "synchronize",   "fence"});
  CHECK(driver->failed() == driver->calls().size());
  CHECK(driver->counts() == DriverCounts{});
  for (const std::string& name : driver->calls()) CHECK_OK(driver->fail_at(0, Code::kDriver, 1, name));
}

TEST_CASE("the_kth_call_from_now_fails_once") {
  const auto driver = make();
  CHECK(codes(*driver, 2) == std::vector<Code>{kGood, kGood});
  REQUIRE_OK(driver->fail_at(1, Code::kDriver));
  CHECK(codes(*driver, 3) == std::vector<Code>{kGood, kBad, kGood});
  CHECK(driver->failed() == 1);
  CHECK(driver->calls().size() == 5);
}

TEST_CASE("a_fault_can_last_several_calls_or_for_ever") {
  const auto driver = make();
  REQUIRE_OK(driver->fail_at(0, Code::kDriver, 2));
  CHECK(codes(*driver, 3) == std::vector<Code>{kBad, kBad, kGood});
  REQUIRE_OK(driver->fail_at(1, Code::kDriver, FaultyDriver::kForever));
  CHECK(codes(*driver, 4) == std::vector<Code>{kGood, kBad, kBad, kBad});
  driver->clear();
  CHECK(codes(*driver, 1) == std::vector<Code>{kGood});
  CHECK(driver->failed() == 0);
}

TEST_CASE("only_counts_and_fails_the_calls_of_one_name") {
  const auto driver = make();
  REQUIRE_OK(driver->fail_at(1, Code::kDriver, 1, "synchronize"));
  CHECK(codes(*driver, 2) == std::vector<Code>{kGood, kGood});
  CHECK_OK(driver->synchronize(kFirst));
  CHECK(codes(*driver, 1) == std::vector<Code>{kGood});
  CHECK_CODE(kDriver, driver->synchronize(kFirst));
  CHECK_OK(driver->synchronize(kFirst));
}

TEST_CASE("a_failed_call_changes_nothing_inside") {
  const auto driver = make();
  const Range range(*driver, kGranule);
  const PhysicalHandle handle = create(*driver, kGranule);
  REQUIRE_OK(driver->fail_at(0, Code::kDriver));
  CHECK_CODE(kDriver, driver->map(range.at(), kGranule, handle));
  CHECK(driver->counts().mappings == 0);
  CHECK_OK(driver->map(range.at(), kGranule, handle));
  REQUIRE_OK(driver->fail_at(0, Code::kDriver));
  CHECK_CODE(kDriver, driver->unmap(range.at(), kGranule));
  CHECK(driver->counts().mappings == 1);
  CHECK_OK(driver->unmap(range.at(), kGranule));
  CHECK_OK(driver->release(handle));
}

TEST_CASE("injected_out_of_memory_carries_numbers") {
  const auto driver = make();
  for (const Code code : {Code::kOutOfDeviceMemory, Code::kOutOfHostMemory}) {
    REQUIRE_OK(driver->fail_at(0, code));
    const Status status = driver->create(3 * kGranule, {kFirst, false, false}).status();
    CHECK(status.code() == code);
    CHECK(status.call() == "create");
    CHECK(status.needed_bytes() == 3 * kGranule);
    CHECK(status.free_bytes() < status.needed_bytes());
    REQUIRE_OK(driver->fail_at(0, code));
    CHECK(driver->create_stream(kFirst).status().needed_bytes() > 0);
  }
}

TEST_CASE("an_injected_broken_context_breaks_every_later_call_until_clear") {
  const auto driver = make();
  REQUIRE_OK(driver->fail_at(0, Code::kContextBroken, 1, "synchronize"));
  CHECK_OK(driver->memory_info(kFirst));
  CHECK_CODE(kContextBroken, driver->synchronize(kFirst));
  CHECK_CODE(kContextBroken, driver->memory_info(kFirst));
  REQUIRE_OK(driver->fail_at(0, Code::kDriver));
  CHECK_CODE(kContextBroken, driver->reserve(kGranule));
  CHECK(driver->failed() == 3);
  driver->clear();
  CHECK_OK(driver->synchronize(kFirst));
}

TEST_CASE("orders_that_mean_nothing_are_refused") {
  const auto driver = make();
  CHECK_CODE(kInvalidValue, driver->fail_at(-1, Code::kDriver));
  CHECK_CODE(kInvalidValue, driver->fail_at(0, Code::kDriver, 0));
  CHECK_CODE(kInvalidValue, driver->fail_at(0, Code::kDriver, -2));
  CHECK_CODE(kInvalidValue, driver->fail_at(0, Code::kOk));
  CHECK_CODE(kInvalidValue, driver->fail_at(0, Code::kDriver, 1, "cuMemMap"));
  CHECK_CODE(kInvalidValue, driver->hold("properties"));
  CHECK(codes(*driver, 1) == std::vector<Code>{kGood});
}

// --- gates ---

constexpr std::chrono::seconds kLong{30};
constexpr std::chrono::milliseconds kShort{20};

TEST_CASE("a_held_call_waits_until_its_gate_opens") {
  const auto driver = make();
  REQUIRE_OK(driver->hold("synchronize"));
  CHECK_FALSE(driver->wait_held("synchronize", kShort));
  std::atomic<bool> returned{false};
  std::thread caller([&] { returned = driver->synchronize(kFirst).ok(); });
  CHECK(driver->wait_held("synchronize", kLong));
  CHECK_FALSE(returned.load());
  CHECK(driver->calls() == Names{"synchronize"});
  CHECK_OK(driver->memory_info(kFirst));  // others pass
  driver->clear();
  CHECK(driver->wait_held("synchronize", kShort));  // clear opens no gate
  driver->release_gate("synchronize");
  caller.join();
  CHECK(returned.load());
  CHECK_FALSE(driver->wait_held("synchronize", kShort));
  CHECK_OK(driver->synchronize(kFirst));
}

TEST_CASE("a_gate_held_again_at_once_lets_the_earlier_call_go") {
  const auto driver = make();
  REQUIRE_OK(driver->hold("synchronize"));
  std::thread caller([&] { static_cast<void>(driver->synchronize(kFirst)); });
  CHECK(driver->wait_held("synchronize", kLong));
  driver->release_gate("synchronize");
  REQUIRE_OK(driver->hold("synchronize"));
  CHECK_FALSE(driver->wait_held("synchronize", kShort));
  caller.join();
}

TEST_CASE("a_held_call_that_is_to_fail_fails_after_its_gate") {
  const auto driver = make();
  REQUIRE_OK(driver->hold("synchronize"));
  REQUIRE_OK(driver->fail_at(0, Code::kDriver));
  std::atomic<Code> seen{Code::kOk};
  std::thread caller([&] { seen = driver->synchronize(kFirst).code(); });
  CHECK(driver->wait_held("synchronize", kLong));
  CHECK_OK(driver->memory_info(kFirst));  // the fault went to the held call
  driver->release_gate("synchronize");
  caller.join();
  CHECK(seen.load() == Code::kDriver);
}

TEST_CASE("threads_share_a_faulty_driver_and_one_gets_the_fault") {
  const auto driver = make();
  REQUIRE_OK(driver->fail_at(100, Code::kDriver));
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) bad += driver->memory_info(kFirst).ok() ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(bad.load() == 1);
  CHECK(driver->calls().size() == 400);
}

}  // namespace cumem::testing
