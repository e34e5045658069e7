// What torch calls: mallocs by slot, one free. Entries are for ever, so a core that has one is never destroyed.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core_helpers.h"
#include "driver/faulty_driver.h"
#include "driver/host_driver.h"
#include "forwarding_driver.h"
#include "own_process.h"
#include "torch_shim.h"

namespace cumem::testing {
namespace {

constexpr std::uint64_t kGranule = 64 * kKiB;

std::shared_ptr<FaultyDriver> make_driver() {
  HostDriverOptions options;
  options.device_bytes = 4 * kMiB;
  options.granularity_bytes = kGranule;
  return std::make_shared<FaultyDriver>(must(HostDriver::create(options)));
}

// A torch pool: a core, a slot of it, an entry for that.
struct Pool {
  explicit Pool(CorePtr of)
      : core(std::move(of)), slot(core->create_slot()), entry(must(add_torch_entry(core, slot))) {}
  Pool() : Pool(make_core(make_driver())) {}
  [[nodiscard]] void* malloc(std::size_t size, int device = 0, void* stream = nullptr) const {
    return torch_malloc(entry)(size, device, stream);
  }
  CorePtr core;
  SlotId slot;
  int entry;
};

DeviceAddress address_of(void* pointer) { return DeviceAddress(reinterpret_cast<std::uint64_t>(pointer)); }

// Says of one stream that it is being captured.
class Capturing : public ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;
  [[nodiscard]] bool is_capturing(std::uint64_t native_stream) override { return native_stream == kCaptured; }
  static constexpr std::uint64_t kCaptured = 0x1234;
};

void* captured_stream() { return reinterpret_cast<void*>(Capturing::kCaptured); }

}  // namespace

TEST_CASE("memory_comes_from_the_entrys_slot_and_goes_back_by_its_address") {
  const Pool pool;
  const Pool other(pool.core);
  void* const a = pool.malloc(1);
  void* const b = other.malloc(kGranule + 1, 1);
  REQUIRE(a != nullptr);
  CHECK(pool.core->find(address_of(a))->slot == pool.slot);
  CHECK(pool.core->find(address_of(b))->slot == other.slot);
  CHECK(pool.core->find(address_of(b))->size == 2 * kGranule);
  CHECK(pool.core->find(address_of(b))->device == kSecond);
  CHECK_FALSE(pool.core->find(address_of(b))->captured);
  torch_free()(b, 12345, 7, nullptr);  // the table knows better than the caller
  CHECK_FALSE(pool.core->find(address_of(b)).has_value());
  torch_free()(a, 0, 0, nullptr);
  CHECK(gives_all_back(*pool.core));
}

TEST_CASE("one_free_serves_several_cores") {
  const Pool first;
  const Pool second;
  void* const a = first.malloc(1);
  void* const b = second.malloc(1);
  torch_free()(b, 1, 0, nullptr);
  CHECK(second.core->segments(std::nullopt).empty());
  CHECK(first.core->segments(std::nullopt).size() == 1);
  torch_free()(a, 1, 0, nullptr);
  CHECK(first.core->segments(std::nullopt).empty());
}

TEST_CASE("a_free_of_what_nobody_gave_does_nothing") {
  const Pool pool;
  int nothing = 0;
  torch_free()(nullptr, 0, 0, nullptr);
  torch_free()(&nothing, 4, 0, nullptr);
  void* const a = pool.malloc(1);
  torch_free()(a, 1, 0, nullptr);
  torch_free()(a, 1, 0, nullptr);
  CHECK(gives_all_back(*pool.core));
}

TEST_CASE("out_of_memory_is_null_without_a_reason") {
  const Pool pool;
  CHECK(pool.malloc(8 * kMiB) == nullptr);
  CHECK_OK(take_torch_error(pool.entry));
}

TEST_CASE("any_other_failure_is_null_with_a_reason_that_is_taken_once") {
  const Pool pool;
  const Pool other(pool.core);
  CHECK(pool.malloc(1, 9) == nullptr);
  CHECK_OK(take_torch_error(other.entry));
  CHECK_CODE(kInvalidValue, take_torch_error(pool.entry));
  CHECK_OK(take_torch_error(pool.entry));
  CHECK(pool.malloc(0) == nullptr);
  CHECK_CODE(kInvalidValue, take_torch_error(pool.entry));
}

TEST_CASE("what_is_made_during_a_capture_is_marked_and_its_free_waits_for_nothing") {
  const auto faulty = make_driver();
  const Pool pool(make_core(std::make_shared<Capturing>(faulty)));
  void* const captured = pool.malloc(1, 0, captured_stream());
  void* const plain = pool.malloc(1);
  CHECK(pool.core->find(address_of(captured))->captured);
  CHECK_FALSE(pool.core->find(address_of(plain))->captured);
  faulty->clear();
  torch_free()(plain, 1, 0, captured_stream());
  CHECK(faulty->calls().empty());
  CHECK(pool.core->dead_bytes() == kGranule);
  torch_free()(captured, 1, 0, nullptr);
  CHECK(faulty->calls() == std::vector<std::string>{"fence", "unmap", "release", "address_free"});
  CHECK_OK(pool.core->reap());
  CHECK(gives_all_back(*pool.core));
}

TEST_CASE("a_free_that_fails_is_ended_by_a_reap") {
  const auto driver = make_driver();
  const Pool pool(make_core(driver));
  void* const a = pool.malloc(1);
  REQUIRE_OK(driver->fail_at(0, Code::kDriver));
  torch_free()(a, 1, 0, nullptr);
  CHECK(pool.core->dead_bytes() == kGranule);
  CHECK_OK(pool.core->reap());
  CHECK(gives_all_back(*pool.core));
}

TEST_CASE("a_fork_gets_nothing_and_gives_nothing_back") {
  const auto driver = make_driver();
  const Pool pool(make_core(driver));
  void* const a = pool.malloc(1);
  const std::size_t calls = driver->calls().size();
  std::cout.flush();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    torch_free()(a, 1, 0, nullptr);
    const bool none = pool.malloc(1) == nullptr;
    _exit(none && driver->calls().size() == calls ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  torch_free()(a, 1, 0, nullptr);
}

TEST_CASE("threads_malloc_and_free_through_entries_while_entries_are_added") {
  const Pool pool;
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        void* const a = pool.malloc(1);
        bad += a != nullptr && pool.core->find(address_of(a)).has_value() ? 0 : 1;
        torch_free()(a, 1, 0, nullptr);
      }
    });
  }
  for (int i = 0; i < 5; ++i) torch_free()(Pool().malloc(1), 1, 0, nullptr);
  for (std::thread& thread : threads) thread.join();
  CHECK(bad.load() == 0);
  CHECK(gives_all_back(*pool.core));
}

TEST_CASE("every_entry_has_a_malloc_of_its_own") {
  std::set<TorchMalloc> mallocs;
  for (int i = 0; i < kTorchEntries; ++i) mallocs.insert(torch_malloc(i));
  CHECK(mallocs.size() == kTorchEntries);
}

TEST_CASE("entries_run_out_with_an_error" * doctest::skip()) {
  const CorePtr core = make_core(make_driver());
  int added = 0;
  Result<int> entry = add_torch_entry(core, core->create_slot());
  for (; entry.ok(); entry = add_torch_entry(core, core->create_slot())) {
    REQUIRE(++added <= kTorchEntries);
  }
  CHECK_CODE(kUnsupported, entry);
  CHECK(entry.status().message().find(std::to_string(kTorchEntries)) != std::string::npos);
}

TEST_CASE("a_process_that_takes_all_entries_is_told_so") {
  CHECK(passes_in_a_process_of_its_own("entries_run_out_with_an_error"));
}

}  // namespace cumem::testing
