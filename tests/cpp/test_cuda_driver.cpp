// The cuda driver on a real device: the shared laws, the core over it, and what is libcuda's own. Skipped where there
// is none.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core_conformance.h"
#include "core_helpers.h"
#include "driver/cuda_driver.h"
#include "driver/faulty_driver.h"
#include "driver_conformance.h"
#include "driver_helpers.h"
#include "transfer.h"

namespace cumem::testing {
namespace {

using Seconds = std::chrono::duration<double>;

// The driver; null, with a message, on a machine without a device that can.
std::shared_ptr<CudaDriver> cuda() {
  auto made = CudaDriver::create();
  if (made.ok()) return std::move(made).value();
  REQUIRE_CODE(kUnsupported, made);
  MESSAGE("skipped: ", made.status().message());
  return nullptr;
}

// The same, also null with a message where there are fewer than two devices.
std::shared_ptr<CudaDriver> two_devices() {
  auto driver = cuda();
  if (driver == nullptr || driver->device_count() > 1) return driver;
  MESSAGE("skipped: one device only");
  return nullptr;
}

// The calling thread's current context, whoever made it.
void* current_context() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  REQUIRE(library != nullptr);
  const auto get = reinterpret_cast<int (*)(void**)>(dlsym(library, "cuCtxGetCurrent"));
  void* context = nullptr;
  const bool told = get != nullptr && get(&context) == 0;
  REQUIRE(told);
  dlclose(library);
  return context;
}

bool all_are(const Bytes& bytes, std::uint8_t byte) {
  return std::all_of(bytes.begin(), bytes.end(), [byte](std::uint8_t b) { return b == byte; });
}

}  // namespace

TEST_CASE("without_a_device_the_cuda_driver_says_what_is_missing") {
  const auto made = CudaDriver::create();
  if (made.ok()) return;
  CHECK_CODE(kUnsupported, made);
  CHECK_FALSE(made.status().message().empty());
  CHECK_CODE(kUnsupported, CudaDriver::create());  // and again
}

// --- the shared suites ---

TEST_CASE("cuda_driver_keeps_the_laws_of_memory") {
  const auto driver = cuda();
  if (driver == nullptr) return;
  for (const ConformanceCase& law : memory_cases()) {
    INFO(law.name);
    run_case(law, *driver);
  }
}

TEST_CASE("cuda_driver_keeps_the_laws_of_work") {
  const auto driver = cuda();
  if (driver == nullptr) return;
  for (const ConformanceCase& law : work_cases()) {
    INFO(law.name);
    run_case(law, *driver);
  }
}

TEST_CASE("a_core_over_the_cuda_driver_keeps_its_promises") {
  const auto driver = cuda();
  if (driver == nullptr) return;
  for (const CoreCase& core_case : core_cases()) {
    INFO(core_case.name);
    run_case(core_case, driver);
  }
}

TEST_CASE("a_sleep_and_a_wake_on_a_device_survive_the_failure_of_any_call") {
  const auto driver = cuda();
  if (driver == nullptr) return;
  fail_every_call_of_a_sleep_and_a_wake(driver);
}

// --- devices and contexts ---

TEST_CASE("a_real_device_describes_itself") {
  const auto driver = cuda();
  if (driver == nullptr) return;
  CHECK(driver->name() == "cuda");
  CHECK(driver->memory_kind() == MemoryKind::kCuda);
  std::set<std::string> uuids;
  for (int i = 0; i < driver->device_count(); ++i) {
    const DeviceProperties properties = must(driver->properties(Device{i}));
    CHECK(properties.total_bytes > 0);
    uuids.insert(properties.uuid);
  }
  CHECK(uuids.size() == static_cast<std::size_t>(driver->device_count()));
}

TEST_CASE("calls_leave_the_threads_current_context_alone") {
  const auto driver = cuda();
  if (driver == nullptr) return;
  std::thread([&] {
    void* const before = current_context();
    {
      const Memory memory(*driver, granularity(*driver));
      CHECK(read(*driver, memory.at(), 8).size() == 8);
    }
    CHECK_REFUSED(driver->create(1, {kFirst, false, false}));
    CHECK_REFUSED(driver->memory_info(Device{driver->device_count()}));
    CHECK(current_context() == before);
  }).join();
}

TEST_CASE("pages_come_out_of_the_devices_free_bytes") {
  const auto driver = cuda();
  if (driver == nullptr) return;
  const std::uint64_t size = kGiB;
  const std::uint64_t near = 256 * kMiB;  // others may take and give meanwhile: one clear reading of several is enough
  bool seen = false;
  for (int attempt = 0; attempt < 10 && !seen; ++attempt) {
    const std::uint64_t before = free_bytes(*driver);
    auto handle = driver->create(size, {kFirst, false, false});
    if (!handle.ok()) continue;
    const std::uint64_t during = free_bytes(*driver);
    CHECK_OK(driver->release(handle.value()));
    const std::uint64_t after = free_bytes(*driver);
    seen = before > during && before - during > size - near && before - during < size + near && after > during &&
           after - during > size - near;
  }
  CHECK(seen);
}

TEST_CASE("two_drivers_of_one_process_count_for_themselves") {
  const auto first = cuda();
  if (first == nullptr) return;
  const auto second = cuda();
  const PhysicalHandle handle = create(*first, granularity(*first));
  CHECK(first->counts().handles == 1);
  CHECK(second->counts() == DriverCounts{});
  CHECK_REFUSED(second->release(handle));  // not its own
  CHECK_OK(first->release(handle));
}

// --- work ---

TEST_CASE("a_fence_waits_for_all_work_of_the_device") {
  const auto driver = cuda();
  if (driver == nullptr) return;
  const std::uint64_t size = 256 * kMiB;
  const Memory memory(*driver, size);
  const Stream stream(*driver);
  const HostMemory host(size);
  REQUIRE_OK(driver->register_host(host.at(), size));
  for (std::uint8_t round = 1; round < 4; ++round) {
    CHECK_OK(driver->fill(memory.at(), round, size, stream.get()));
    CHECK_OK(driver->copy_to_host(host.at(), memory.at(), size, stream.get()));
    CHECK_OK(driver->fence(kFirst));
    CHECK(*host.at() == round);
    CHECK(*host.at(size - 1) == round);
  }
  CHECK_OK(driver->unregister_host(host.at()));
}

TEST_CASE("no_stream_is_captured_where_nobody_captures") {
  const auto driver = cuda();
  if (driver == nullptr) return;
  CHECK_FALSE(driver->is_capturing(0));
}

TEST_CASE("transfers_of_many_chunks_arrive_whole_pinned_or_not") {
  const auto driver = cuda();
  if (driver == nullptr) return;
  DeviceWaiter waiter(driver, Seconds(60));
  const std::uint64_t size = 192 * kMiB;
  const Memory memory(*driver, size);
  const HostMemory host(size);
  const Bytes bytes = pattern(size, 3);
  for (const bool pinned : {false, true}) {
    CAPTURE(pinned);
    Transfer transfer(driver, waiter);
    if (pinned) REQUIRE_OK(driver->register_host(host.at(), size));
    Move move{Move::Kind::kToDevice, kFirst, memory.at(), reinterpret_cast<std::byte*>(host.at()), size, 0};
    std::copy(bytes.begin(), bytes.end(), host.at());
    CHECK_OK(transfer.run({move}));
    std::fill(host.at(), host.at() + size, std::uint8_t{0});
    move.kind = Move::Kind::kToHost;
    CHECK_OK(transfer.run({move}));
    CHECK(std::equal(bytes.begin(), bytes.end(), host.at()));
    CHECK(transfer.progress().done_bytes == size);
    if (pinned) CHECK_OK(driver->unregister_host(host.at()));
  }
}

TEST_CASE("threads_share_a_cuda_driver") {
  const auto driver = cuda();
  if (driver == nullptr) return;
  const DriverCounts before = driver->counts();
  const std::uint64_t g = granularity(*driver);
  const int devices = std::min(driver->device_count(), 2);
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const Device device{t % devices};
      Bytes bytes(g);
      for (int round = 0; round < 10; ++round) {
        const auto address = driver->reserve(g);
        const auto handle = driver->create(g, {device, false, false});
        const auto stream = driver->create_stream(device);
        if (!address.ok() || !handle.ok() || !stream.ok()) {
          ++bad;
          return;
        }
        const auto byte = static_cast<std::uint8_t>(16 * t + round);
        bool good = driver->map(address.value(), g, handle.value()).ok() &&
                    driver->set_access(address.value(), g, {device}).ok() &&
                    driver->fill(address.value(), byte, g, stream.value()).ok() &&
                    driver->copy_to_host(bytes.data(), address.value(), g, stream.value()).ok() &&
                    driver->synchronize(device).ok() && all_are(bytes, byte);
        good = driver->destroy_stream(stream.value()).ok() && good;
        good = driver->unmap(address.value(), g).ok() && good;
        good = driver->release(handle.value()).ok() && good;
        good = driver->address_free(address.value(), g).ok() && good;
        bad += good ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(bad.load() == 0);
  CHECK(driver->counts() == before);
}

// --- two devices ---

TEST_CASE("a_segment_of_the_second_device_can_be_read_by_the_first") {
  const auto driver = two_devices();
  if (driver == nullptr) return;
  if (!must(driver->can_access_peer(kFirst, kSecond))) {
    MESSAGE("skipped: the devices cannot reach each other");
    return;
  }
  const CorePtr core = make_core(driver);
  Segments segments(*core, 1, 1, kSecond);
  const Bytes& contents = segments.contents()[0];
  const std::uint64_t size = contents.size();
  CHECK((read(*driver, segments.addresses()[0], size, kFirst) == contents));
  {
    const Claim claim(*core, segments.ids());
    REQUIRE_OK(segments.sleep());
    REQUIRE_OK(segments.wake());
  }
  CHECK((read(*driver, segments.addresses()[0], size, kFirst) == contents));
  segments.free_all();
}

TEST_CASE("transfers_of_two_devices_run_beside_each_other") {
  const auto driver = two_devices();
  if (driver == nullptr) return;
  DeviceWaiter waiter(driver, Seconds(60));
  Transfer transfer(driver, waiter);
  const std::uint64_t size = 128 * kMiB;
  const Memory first(*driver, size, kFirst);
  const Memory second(*driver, size, kSecond);
  Bytes a(size), b(size);
  const auto down = [&](Device device, DeviceAddress from, Bytes& to) {
    return Move{Move::Kind::kToHost, device, from, reinterpret_cast<std::byte*>(to.data()), size, 0};
  };
  CHECK_OK(transfer.run({{Move::Kind::kFill, kFirst, first.at(), nullptr, size, 1},
                         {Move::Kind::kFill, kSecond, second.at(), nullptr, size, 2},
                         down(kFirst, first.at(), a),
                         down(kSecond, second.at(), b)}));
  CHECK(all_are(a, 1));
  CHECK(all_are(b, 2));
}

}  // namespace cumem::testing
