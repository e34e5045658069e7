// A process that exits, and one that forks: what a core's objects do then. Exiting is for ever, so each such case runs
// in a process of its own: the same program, started again for one case that is skipped otherwise.
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "core_helpers.h"
#include "driver/faulty_driver.h"
#include "driver/host_driver.h"
#include "own_process.h"
#include "process.h"

namespace cumem::testing {
namespace {

constexpr std::uint64_t kGranule = 64 * kKiB;

std::shared_ptr<FaultyDriver> make_driver() {
  HostDriverOptions options;
  options.device_bytes = 4 * kMiB;
  options.granularity_bytes = kGranule;
  return std::make_shared<FaultyDriver>(must(HostDriver::create(options)));
}

// Runs `work` in a fork, which ends with what it returns; a fork that hangs ends by a signal.
int in_a_fork(int (*work)(void*), void* argument) {
  std::cout.flush();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(work(argument));
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return status;
}

bool ended_well(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }

// A core with segments resident and asleep, a block, a backup and copies made: everything that has an end.
struct Everything {
  std::shared_ptr<FaultyDriver> driver = make_driver();
  CorePtr core = make_core(driver);
  std::unique_ptr<Segments> segments = std::make_unique<Segments>(*core, 2, 1);
  std::unique_ptr<BlockHold> block = must(core->add_block(segments->addresses()[0], 0, 8));
  HostRange view;

  Everything() {
    const Claim claim(*core, segments->ids());
    REQUIRE_OK(segments->sleep());
    CHECK(all_ok(core->map({segments->ids()[0]})));
    view = must(core->host_view(segments->addresses()[1], 8));
  }
  void end() {
    segments.reset();
    view = HostRange();
    block.reset();
    core.reset();
  }
};

}  // namespace

TEST_CASE("this_process_may_call_the_driver") {
  CHECK(may_call_driver());
  CHECK_FALSE(is_forked_child());
}

TEST_CASE("a_fork_of_the_process_may_not_call_the_driver") {
  const int status = in_a_fork([](void*) { return is_forked_child() && !may_call_driver() ? 0 : 1; }, nullptr);
  CHECK(ended_well(status));
  CHECK(may_call_driver());
}

TEST_CASE("in_a_fork_everything_ends_without_a_call_to_the_parents_driver") {
  Everything all;
  const std::size_t calls = all.driver->calls().size();
  const DriverCounts counts = all.driver->counts();
  const auto end_in_child = [](void* argument) {
    auto* parents = static_cast<Everything*>(argument);
    const std::size_t before = parents->driver->calls().size();
    parents->end();
    return parents->driver->calls().size() == before ? 0 : 1;
  };
  CHECK(ended_well(in_a_fork(end_in_child, &all)));
  CHECK(all.driver->calls().size() == calls);
  CHECK(all.driver->counts() == counts);
  const Claim claim(*all.core, all.segments->ids());
  REQUIRE_OK(all.segments->wake());  // nothing of the parent's was touched
  all.segments->check_contents();
}

// --- exiting; each in a process of its own ---

TEST_CASE("once_exiting_everything_ends_without_a_call_to_the_driver_and_its_memory_stays" * doctest::skip()) {
  Everything all;
  volatile std::uint8_t* const mapped = reinterpret_cast<std::uint8_t*>(all.segments->addresses()[0].value);
  volatile std::byte* const backup = all.view.data;
  std::weak_ptr<FaultyDriver> driver = all.driver;
  const std::size_t calls = all.driver->calls().size();
  mark_exiting();
  CHECK_FALSE(may_call_driver());
  CHECK_FALSE(is_forked_child());
  all.end();
  CHECK(all.driver->calls().size() == calls);
  all.driver.reset();
  CHECK_FALSE(driver.expired());  // or its destructor would take the pages back
  mapped[0] = 1;
  backup[0] = std::byte{1};
}

TEST_CASE("once_exiting_a_core_that_ends_leaves_its_pages_mapped" * doctest::skip()) {
  auto driver = make_driver();
  CorePtr core = make_core(driver);
  const DeviceAddress address = must(core->malloc(core->create_slot(), 1, kFirst, false));
  mark_exiting();
  core.reset();
  driver.reset();  // the last owner but for the leak
  *reinterpret_cast<volatile std::uint8_t*>(address.value) = 1;
}

TEST_CASE("once_exiting_a_block_leaves_its_segment_as_it_is" * doctest::skip()) {
  const auto driver = make_driver();
  const CorePtr core = make_core(driver);
  const DeviceAddress address = must(core->malloc(core->create_slot(), 1, kFirst, false));
  auto block = must(core->add_block(address, 0, 8));
  CHECK_OK(core->free(address));
  mark_exiting();
  block.reset();
  CHECK(core->find(address).has_value());
}

TEST_CASE("once_exiting_owners_of_driver_objects_leak_them" * doctest::skip()) {
  const auto driver = make_driver();
  {
    const AddressRange range = must(AddressRange::reserve(driver, kGranule));
    PhysicalMemory mapped = must(PhysicalMemory::create(driver, kGranule, {}));
    const PhysicalMemory memory = must(PhysicalMemory::create(driver, kGranule, {}));
    const Mapping mapping = must(Mapping::map(driver, range.address(), mapped));
    const auto arena = std::make_shared<HostArena>(driver, std::nullopt);
    CHECK_OK(arena->allocate({512}));
    mark_exiting();
  }
  CHECK(driver->counts().ranges == 1);
  CHECK(driver->counts().handles == 2);
  CHECK(driver->counts().mappings == 1);
  CHECK(driver->counts().registrations == 1);
}

TEST_CASE("a_process_that_exits_leaks_instead_of_calling_the_driver") {
  for (const char* test_case :
       {"once_exiting_everything_ends_without_a_call_to_the_driver_and_its_memory_stays",
        "once_exiting_a_core_that_ends_leaves_its_pages_mapped", "once_exiting_a_block_leaves_its_segment_as_it_is",
        "once_exiting_owners_of_driver_objects_leak_them"}) {
    CAPTURE(test_case);
    CHECK(passes_in_a_process_of_its_own(test_case));
  }
}

}  // namespace cumem::testing
