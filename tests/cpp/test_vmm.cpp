// The owners of pages, addresses and mappings: what they give back, when, and what is left after a failure.
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "driver/faulty_driver.h"
#include "driver/host_driver.h"
#include "driver_helpers.h"
#include "segment.h"
#include "vmm.h"

namespace cumem::testing {
namespace {

constexpr std::uint64_t kGranule = 64 * kKiB;
constexpr AllocationProperties kPlain{};
using Names = std::vector<std::string>;

std::shared_ptr<FaultyDriver> make() {
  HostDriverOptions options;
  options.device_bytes = 4 * kMiB;
  options.granularity_bytes = kGranule;
  return std::make_shared<FaultyDriver>(must(HostDriver::create(options)));
}

PhysicalMemory pages(const std::shared_ptr<FaultyDriver>& driver, std::uint64_t size = kGranule) {
  return must(PhysicalMemory::create(driver, size, kPlain));
}

AddressRange range(const std::shared_ptr<FaultyDriver>& driver, std::uint64_t size = kGranule) {
  return must(AddressRange::reserve(driver, size));
}

Mapping mapping(const std::shared_ptr<FaultyDriver>& driver, const AddressRange& at) {
  PhysicalMemory memory = pages(driver, at.size());
  return must(Mapping::map(driver, at.address(), memory));
}

// Closes twice while the driver refuses, then once more: still owning, still owning, gone.
template <typename Owner>
void check_close_can_be_repeated(FaultyDriver& driver, Owner& owner, const char* call) {
  REQUIRE_OK(driver.fail_at(0, Code::kDriver, 2, call));
  CHECK_CODE(kDriver, owner.close());
  CHECK_CODE(kDriver, owner.close());
  CHECK_FALSE(owner.empty());
  CHECK_OK(owner.close());
  CHECK(owner.empty());
  CHECK_OK(owner.close());  // of nothing
}

}  // namespace

static_assert(!std::is_copy_constructible_v<PhysicalMemory> && !std::is_copy_assignable_v<PhysicalMemory>);
static_assert(!std::is_copy_constructible_v<AddressRange> && !std::is_copy_assignable_v<AddressRange>);
static_assert(!std::is_copy_constructible_v<Mapping> && !std::is_copy_assignable_v<Mapping>);
static_assert(std::is_nothrow_move_constructible_v<Mapping>);  // a vector of them never copies

TEST_CASE("owners_give_back_at_their_end_what_they_took") {
  const auto driver = make();
  {
    const PhysicalMemory memory = pages(driver, 2 * kGranule);
    const AddressRange addresses = range(driver);
    const Mapping mapped = mapping(driver, addresses);
    CHECK_FALSE(memory.empty());
    CHECK(memory.size() == 2 * kGranule);
    CHECK(addresses.size() == kGranule);
    CHECK(mapped.mapped());
    CHECK(mapped.size() == kGranule);
    CHECK(driver->counts().handles == 2);
    CHECK(driver->counts().mappings == 1);
    CHECK(driver->counts().ranges == 1);
  }
  CHECK(driver->counts() == DriverCounts{});
}

TEST_CASE("empty_owners_own_nothing") {
  PhysicalMemory memory;
  AddressRange addresses;
  Mapping mapped;
  CHECK(memory.empty());
  CHECK(addresses.empty());
  CHECK_FALSE(mapped.mapped());
  CHECK_OK(memory.close());
  CHECK_OK(addresses.close());
  CHECK_OK(mapped.close());
}

TEST_CASE("what_the_driver_refuses_is_reported_and_owned_by_nobody") {
  const auto driver = make();
  const auto create = [&](std::uint64_t size) { return PhysicalMemory::create(driver, size, kPlain); };
  const Status full = create(8 * kMiB).status();
  CHECK_CODE(kOutOfDeviceMemory, full);
  CHECK(full.needed_bytes() == 8 * kMiB);
  CHECK(full.free_bytes() == 4 * kMiB);
  CHECK_REFUSED(create(1));
  CHECK_REFUSED(AddressRange::reserve(driver, 1));
  CHECK(driver->counts() == DriverCounts{});
}

TEST_CASE("a_moved_owner_is_empty_and_what_it_had_ends_once") {
  const auto driver = make();
  {
    PhysicalMemory memory = pages(driver);
    const PhysicalHandle handle = memory.handle();
    const PhysicalMemory taken = std::move(memory);
    CHECK(memory.empty());  // NOLINT(bugprone-use-after-move)
    CHECK(taken.handle() == handle);
    AddressRange addresses = range(driver);
    const AddressRange here = std::move(addresses);
    CHECK(addresses.empty());  // NOLINT(bugprone-use-after-move)
    Mapping mapped = mapping(driver, here);
    const Mapping kept = std::move(mapped);
    CHECK_FALSE(mapped.mapped());  // NOLINT(bugprone-use-after-move)
    CHECK(kept.mapped());
  }
  CHECK(driver->counts() == DriverCounts{});
}

TEST_CASE("an_assigned_owner_loses_nothing_that_it_had") {
  const auto driver = make();
  const AddressRange first_range = range(driver);
  const AddressRange second_range = range(driver);
  Mapping mapped = mapping(driver, first_range);
  PhysicalMemory memory = pages(driver);
  AddressRange addresses = range(driver);
  mapped = mapping(driver, second_range);
  memory = pages(driver, 2 * kGranule);
  addresses = range(driver);
  CHECK(memory.size() == 2 * kGranule);
  CHECK(driver->counts().mappings == 1);
  CHECK(driver->counts().handles == 2);
  CHECK(driver->counts().ranges == 3);
  memory = PhysicalMemory();
  mapped = Mapping();
  CHECK(driver->counts().handles == 0);
  CHECK(driver->counts().mappings == 0);
}

TEST_CASE("a_failed_close_still_owns_and_can_be_repeated") {
  const auto driver = make();
  PhysicalMemory memory = pages(driver);
  AddressRange addresses = range(driver);
  check_close_can_be_repeated(*driver, memory, "release");
  check_close_can_be_repeated(*driver, addresses, "address_free");
  CHECK(driver->counts() == DriverCounts{});
}

TEST_CASE("a_destructor_ends_what_a_failed_close_left") {
  const auto driver = make();
  {
    const AddressRange addresses = range(driver);
    Mapping mapped = mapping(driver, addresses);
    REQUIRE_OK(driver->fail_at(0, Code::kDriver));
    CHECK_CODE(kDriver, mapped.close());
    CHECK(mapped.mapped());
  }
  CHECK(driver->counts() == DriverCounts{});
}

TEST_CASE("a_destructor_whose_driver_refuses_leaks_and_does_no_more") {
  const auto driver = make();
  {
    const AddressRange addresses = range(driver);
    const Mapping mapped = mapping(driver, addresses);
    driver->clear();
    REQUIRE_OK(driver->fail_at(0, Code::kDriver, FaultyDriver::kForever));
  }
  CHECK(driver->calls() == Names{"unmap", "release", "address_free"});  // each once
  CHECK(driver->counts().mappings == 1);
  CHECK(driver->counts().handles == 1);
  CHECK(driver->counts().ranges == 1);
}

TEST_CASE("a_failed_map_leaves_the_pages_to_the_caller") {
  const auto driver = make();
  const AddressRange addresses = range(driver);
  PhysicalMemory memory = pages(driver);
  REQUIRE_OK(driver->fail_at(0, Code::kDriver));
  CHECK_CODE(kDriver, Mapping::map(driver, addresses.address(), memory));
  CHECK_FALSE(memory.empty());
  CHECK(driver->counts().mappings == 0);
  const Mapping mapped = must(Mapping::map(driver, addresses.address(), memory));
  CHECK(memory.empty());
  CHECK(driver->counts().mappings == 1);
}

TEST_CASE("a_mapping_unmaps_before_it_releases") {
  const auto driver = make();
  const AddressRange addresses = range(driver);
  Mapping mapped = mapping(driver, addresses);
  driver->clear();
  CHECK_OK(mapped.close());
  CHECK(driver->calls() == Names{"unmap", "release"});
  CHECK_OK(mapped.close());
  CHECK(driver->calls().size() == 2);
}

TEST_CASE("a_close_whose_release_failed_goes_on_with_the_release") {
  const auto driver = make();
  const AddressRange addresses = range(driver);
  Mapping mapped = mapping(driver, addresses);
  driver->clear();
  REQUIRE_OK(driver->fail_at(0, Code::kDriver, 1, "release"));
  CHECK_CODE(kDriver, mapped.close());
  CHECK_FALSE(mapped.mapped());
  CHECK(driver->counts().handles == 1);
  CHECK_OK(mapped.close());
  CHECK(driver->calls() == Names{"unmap", "release", "release"});
  CHECK(driver->counts().handles == 0);
}

TEST_CASE("the_pages_of_a_mapping_whose_release_failed_can_be_taken") {
  const auto driver = make();
  const AddressRange addresses = range(driver);
  Mapping mapped = mapping(driver, addresses);
  REQUIRE_OK(driver->fail_at(0, Code::kDriver, 1, "release"));
  CHECK_CODE(kDriver, mapped.close());
  PhysicalMemory memory = mapped.take_memory();
  CHECK_OK(mapped.close());
  CHECK(driver->counts().handles == 1);
  CHECK_OK(memory.close());
  CHECK(driver->counts().handles == 0);
}

TEST_CASE("access_is_set_for_the_whole_mapping") {
  const auto driver = make();
  const AddressRange addresses = range(driver, 3 * kGranule);
  Mapping mapped = mapping(driver, addresses);
  CHECK_OK(mapped.set_access({kFirst}));
  write(*driver, addresses.address(), pattern(3 * kGranule));
  CHECK(read(*driver, addresses.address(), 3 * kGranule) == pattern(3 * kGranule));
}

TEST_CASE("a_segment_that_ends_gives_pages_back_before_addresses") {
  const auto driver = make();
  {
    Segment segment;
    segment.range = range(driver, kGranule);
    segment.mappings.push_back(mapping(driver, segment.range));
    driver->clear();
  }
  CHECK(driver->calls() == Names{"unmap", "release", "address_free"});
  CHECK(driver->counts() == DriverCounts{});
}

}  // namespace cumem::testing
