// The core over the host driver: the shared cases, and what only emulated devices can show every time.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core.h"
#include "core_conformance.h"
#include "core_helpers.h"
#include "driver/faulty_driver.h"
#include "driver/host_driver.h"
#include "forwarding_driver.h"

namespace cumem::testing {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr std::uint64_t kGranule = 64 * kKiB;

HostDriverOptions small() {
  HostDriverOptions options;
  options.device_bytes = 16 * kMiB;
  options.granularity_bytes = kGranule;
  return options;
}

std::shared_ptr<HostDriver> make_host(const HostDriverOptions& options = small()) {
  return must(HostDriver::create(options));
}

std::shared_ptr<FaultyDriver> make_faulty() { return std::make_shared<FaultyDriver>(make_host()); }

CoreOptions impatient() {
  CoreOptions options;
  options.device_timeout = Seconds(0.05);
  return options;
}

std::int64_t count(const FaultyDriver& driver, const char* call) {
  const auto calls = driver.calls();
  return std::count(calls.begin(), calls.end(), call);
}

// A segment that is dead and was not reaped.
void leave_a_dead_segment(Core& core, std::uint64_t size) {
  const DeviceAddress address = must(core.malloc(core.create_slot(), size, kFirst, false));
  const auto block = must(core.add_block(address, 0, 1));
  CHECK_OK(core.free(address));
}

// Says what it was asked to create, and answers as a device that claims to know RDMA.
class Picky : public ForwardingDriver {
 public:
  Picky(std::shared_ptr<Driver> inner, bool makes_rdma) : ForwardingDriver(std::move(inner)), makes_rdma_(makes_rdma) {}
  Result<DeviceProperties> properties(Device device) override {
    ++questions_;
    DeviceProperties properties = must(ForwardingDriver::properties(device));
    properties.rdma = true;
    return properties;
  }
  Result<PhysicalHandle> create(std::uint64_t size, const AllocationProperties& properties) override {
    created_.push_back(properties);
    AllocationProperties plain = properties;
    plain.rdma = false;
    if (properties.rdma && !makes_rdma_) return Status(Code::kUnsupported, "create", "no RDMA here");
    return ForwardingDriver::create(size, plain);
  }
  [[nodiscard]] const std::vector<AllocationProperties>& created() const { return created_; }
  [[nodiscard]] int questions() const { return questions_; }

 private:
  const bool makes_rdma_;
  std::vector<AllocationProperties> created_;
  int questions_ = 0;
};

}  // namespace

TEST_CASE("a_core_over_the_host_driver_keeps_its_promises") {
  for (const CoreCase& core_case : core_cases()) {
    SUBCASE(core_case.name) { run_case(core_case, make_host()); }
  }
}

TEST_CASE("a_core_over_one_device_with_pages_as_granules_keeps_its_promises") {
  HostDriverOptions options = small();
  options.device_count = 1;
  options.granularity_bytes = 8 * kKiB;
  const auto driver = make_host(options);
  for (const CoreCase& core_case : core_cases()) {
    INFO(core_case.name);
    run_case(core_case, driver);
  }
}

TEST_CASE("a_core_without_pinned_memory_keeps_its_promises") {
  HostDriverOptions options = small();
  options.refuse_pinning = true;
  const auto driver = make_host(options);
  for (const CoreCase& core_case : core_cases()) {
    INFO(core_case.name);
    run_case(core_case, driver);
  }
}

// --- memory that is short ---

TEST_CASE("malloc_reaps_what_is_dead_when_memory_is_short") {
  const CorePtr core = make_core(make_host());
  const SlotId slot = core->create_slot();
  leave_a_dead_segment(*core, 10 * kMiB);
  CHECK(core->dead_bytes() == 10 * kMiB);
  const DeviceAddress address = must(core->malloc(slot, 12 * kMiB, kFirst, false));
  CHECK(core->dead_bytes() == 0);
  CHECK_OK(core->free(address));
}

TEST_CASE("malloc_reaps_on_its_own_account_once_256_MiB_are_dead") {
  HostDriverOptions options = small();
  options.device_bytes = kGiB;
  const CorePtr core = make_core(make_host(options));
  const SlotId slot = core->create_slot();
  leave_a_dead_segment(*core, 128 * kMiB);
  leave_a_dead_segment(*core, 128 * kMiB - kGranule);
  CHECK_OK(core->free(must(core->malloc(slot, 1, kFirst, false))));
  CHECK(core->dead_bytes() == 256 * kMiB - kGranule);
  leave_a_dead_segment(*core, kGranule);
  CHECK_OK(core->free(must(core->malloc(slot, 1, kFirst, false))));
  CHECK(core->dead_bytes() == 0);
}

TEST_CASE("malloc_tries_again_after_a_reap_that_could_not_end_everything") {
  const auto driver = make_faulty();
  const CorePtr core = make_core(driver);
  const SlotId slot = core->create_slot();
  leave_a_dead_segment(*core, 6 * kMiB);
  leave_a_dead_segment(*core, 6 * kMiB);
  REQUIRE_OK(driver->fail_at(1, Code::kDriver, 1, "unmap"));
  CHECK_OK(core->malloc(slot, 8 * kMiB, kFirst, false));
  CHECK(core->dead_bytes() == 6 * kMiB);
}

TEST_CASE("pages_that_could_not_be_released_are_reaped_when_memory_is_short") {
  const auto driver = make_faulty();
  const CorePtr core = make_core(driver);
  const SlotId slot = core->create_slot();
  const DeviceAddress address = must(core->malloc(slot, 10 * kMiB, kFirst, false));
  {
    const Claim claim(*core, {core->find(address)->id});
    REQUIRE_OK(driver->fail_at(0, Code::kDriver, 2, "release"));
    CHECK_FALSE(all_ok(core->unmap(claim.ids())));
    CHECK(core->find(address)->state == SegmentState::kAsleep);
    CHECK(driver->counts().physical_bytes == 10 * kMiB);
  }
  CHECK_OK(core->malloc(slot, 12 * kMiB, kFirst, false));
}

TEST_CASE("malloc_keeps_the_margin_free") {
  CoreOptions options;
  options.margin_bytes = 4 * kMiB;
  const CorePtr core = make_core(make_host(), options);
  const SlotId slot = core->create_slot();
  const Status status = core->malloc(slot, 12 * kMiB + 1, kFirst, false).status();
  CHECK_CODE(kOutOfDeviceMemory, status);
  CHECK(status.needed_bytes() == 12 * kMiB + kGranule);
  CHECK(status.free_bytes() == 12 * kMiB);
  CHECK(gives_all_back(*core));
  CHECK_OK(core->malloc(slot, 12 * kMiB, kFirst, false));
  CHECK_CODE(kOutOfDeviceMemory, core->malloc(slot, 1, kFirst, false));
  CHECK_OK(core->malloc(slot, 1, kSecond, false));
}

TEST_CASE("a_margin_larger_than_the_device_allows_nothing") {
  CoreOptions options;
  options.margin_bytes = 64 * kGiB;
  const CorePtr core = make_core(make_host(), options);
  CHECK_CODE(kOutOfDeviceMemory, core->malloc(core->create_slot(), 1, kFirst, false));
}

TEST_CASE("a_budget_refuses_a_backup_before_anything_changes") {
  CoreOptions options;
  options.host_budget_bytes = kGranule;
  const CorePtr core = make_core(make_host(), options);
  Segments segments(*core, 2, 1);
  const Claim claim(*core, segments.ids());
  CHECK_CODE(kOutOfHostMemory, core->reserve_backup(segments.extents()));
  CHECK(core->arena().bytes() == 0);
  CHECK_OK(core->reserve_backup({segments.extents()[0]}));
  CHECK(core->backup_bytes(segments.ids()[0]) == kGranule);
}

// --- work in flight ---

TEST_CASE("free_waits_for_kernels_in_flight") {
  const auto driver = make_host();
  const CorePtr core = make_core(driver);
  const DeviceAddress address = must(core->malloc(core->create_slot(), 1, kFirst, false));
  REQUIRE_OK(driver->launch_fill(address, 1, 8));
  CHECK_OK(core->free(address));
  CHECK_OK(driver->synchronize(kFirst));
}

TEST_CASE("reap_waits_once_for_kernels_in_flight_on_each_device") {
  const auto driver = make_faulty();
  const auto host = std::static_pointer_cast<HostDriver>(driver->inner());
  const CorePtr core = make_core(driver);
  for (int i = 0; i < 4; ++i) {
    const DeviceAddress address = must(core->malloc(core->create_slot(), 1, Device{i % 2}, false));
    const auto block = must(core->add_block(address, 0, 8));
    REQUIRE_OK(host->launch_fill(address, 1, 8));
    CHECK_OK(core->free(address));
  }
  driver->clear();
  CHECK(must(core->reap()) == 4 * kGranule);
  CHECK(count(*driver, "synchronize") == 2);
  CHECK_OK(driver->synchronize(kFirst));
  CHECK_OK(driver->synchronize(kSecond));
}

TEST_CASE("freeing_what_is_asleep_waits_for_nothing") {
  const auto driver = make_faulty();
  const CorePtr core = make_core(driver);
  Segments segments(*core, 1, 1);
  {
    const Claim claim(*core, segments.ids());
    CHECK(all_ok(core->unmap(claim.ids())));
  }
  driver->clear();
  segments.free_all();
  CHECK(driver->calls() == std::vector<std::string>{"address_free"});
}

TEST_CASE("a_core_that_ends_waits_for_kernels_in_flight") {
  const auto driver = make_host();
  CorePtr core = make_core(driver);
  const DeviceAddress address = must(core->malloc(core->create_slot(), 1, kSecond, false));
  REQUIRE_OK(driver->launch_fill(address, 1, 8));
  core.reset();
  CHECK(driver->counts() == DriverCounts{});
  CHECK_OK(driver->synchronize(kSecond));
}

// --- a device that does not become idle ---

TEST_CASE("a_wait_for_a_busy_device_ends_and_changes_nothing") {
  const auto driver = make_faulty();
  const CorePtr core = make_core(driver, impatient());
  REQUIRE_OK(driver->hold("synchronize"));
  CHECK_CODE(kBusy, core->wait_devices({kFirst}));
  CHECK(core->broken().empty());
  driver->release_gate("synchronize");
}

TEST_CASE("a_reap_that_meets_a_busy_device_leaves_the_dead_for_the_next") {
  const auto driver = make_faulty();
  CoreOptions options = impatient();
  const CorePtr core = make_core(driver, options);
  leave_a_dead_segment(*core, 1);
  REQUIRE_OK(driver->hold("synchronize"));
  CHECK_CODE(kBusy, core->reap());
  CHECK(core->dead_bytes() == kGranule);
  CHECK(driver->counts().mappings == 1);
  CHECK(broken_law(*core) == "");
  driver->release_gate("synchronize");
  Result<std::uint64_t> reaped = core->reap();
  for (int i = 0; i < 600 && code_of(reaped) == Code::kBusy; ++i) reaped = core->reap();
  CHECK(must(reaped) == kGranule);
}

TEST_CASE("host_memory_of_copies_that_may_be_in_flight_is_never_given_away") {
  const auto driver = make_faulty();
  {
    const CorePtr core = make_core(driver, impatient());
    Segments segments(*core, 1, 1);
    {
      const Claim claim(*core, segments.ids());
      REQUIRE_OK(core->reserve_backup(segments.extents()));
      REQUIRE_OK(driver->hold("synchronize"));
      REQUIRE_OK(driver->fail_at(0, Code::kDriver, 1, "query_event"));
      CHECK_CODE(kBusy, core->save(segments.extents()));
      core->release_backup(segments.extents(), false);
      CHECK(driver->counts().registrations == 1);
      CHECK(core->arena().used_bytes() == kGranule);
      driver->release_gate("synchronize");
    }
    CHECK_OK(driver->inner()->synchronize(kFirst));  // the copy ends in memory that is still there
  }
  CHECK(driver->counts() == DriverCounts{});  // the core waited at its end
}

TEST_CASE("a_reap_beside_a_capture_waits_by_fences_only") {
  const auto driver = make_faulty();
  const CorePtr core = make_core(driver);
  Segments segments(*core, 1, 1);
  {
    const Claim claim(*core, segments.ids());
    REQUIRE_OK(core->reserve_backup(segments.extents()));
    driver->clear();
    REQUIRE_OK(driver->fail_at(2, Code::kDriver, 2));  // the query, and the wait that follows
    CHECK_CODE(kBusy, core->save(segments.extents()));
  }
  leave_a_dead_segment(*core, 1);
  driver->clear();
  CHECK(must(core->reap(true)) == kGranule);
  CHECK(count(*driver, "fence") == 2);  // for the memory of the copy, and for the dead
  CHECK(count(*driver, "synchronize") == 0);
}

TEST_CASE("a_core_that_ends_while_a_device_is_stuck_leaks_what_may_be_in_use") {
  const auto driver = make_faulty();
  CorePtr core = make_core(driver, impatient());
  std::byte* backup = nullptr;
  {
    Segments segments(*core, 1, 1);
    const Claim claim(*core, segments.ids());
    REQUIRE_OK(core->reserve_backup(segments.extents()));
    backup = must(core->host_view(segments.addresses()[0], 8)).data;
    REQUIRE_OK(driver->hold("synchronize"));
    REQUIRE_OK(driver->fail_at(0, Code::kDriver, 1, "query_event"));
    CHECK_CODE(kBusy, core->save(segments.extents()));
  }
  const auto use_count = driver.use_count();
  core.reset();
  CHECK(driver->counts().mappings == 1);
  CHECK(driver->counts().registrations == 1);
  backup[0] = std::byte{1};  // a copy may still write here
  driver->release_gate("synchronize");
  CHECK_OK(driver->inner()->synchronize(kFirst));
  CHECK(driver.use_count() <= use_count);
}

// --- devices ---

TEST_CASE("every_peer_can_reach_a_segment_also_after_a_wake") {
  const auto driver = make_host();
  const CorePtr core = make_core(driver);
  Segments segments(*core, 1, 1, kSecond);
  const auto peer_reads = [&] { return read(*driver, segments.addresses()[0], 8, kFirst); };
  const Bytes& contents = segments.contents()[0];
  CHECK(peer_reads() == Bytes(contents.begin(), contents.begin() + 8));
  const Claim claim(*core, segments.ids());
  CHECK(all_ok(core->unmap(claim.ids())));
  CHECK(all_ok(core->map(claim.ids())));
  CHECK(peer_reads() == Bytes(8, kFreshPoison));
}

TEST_CASE("pages_are_created_with_the_same_properties_at_every_wake") {
  for (const bool makes_rdma : {false, true}) {
    const auto driver = std::make_shared<Picky>(make_host(), makes_rdma);
    const CorePtr core = make_core(driver);
    const DeviceAddress address = must(core->malloc(core->create_slot(), 1, kSecond, true));
    const Claim claim(*core, {core->find(address)->id});
    CHECK(all_ok(core->unmap(claim.ids())));
    CHECK(all_ok(core->map(claim.ids())));
    REQUIRE(driver->created().size() == 3);  // the first one asked whether such pages can be made
    for (std::size_t i = 1; i < 3; ++i) {
      CHECK(driver->created()[i].device == kSecond);
      CHECK(driver->created()[i].exportable);
      CHECK(driver->created()[i].rdma == makes_rdma);
    }
  }
}

TEST_CASE("a_device_is_asked_once_what_it_can") {
  const auto driver = std::make_shared<Picky>(make_host(), true);
  const CorePtr core = make_core(driver);
  for (int i = 0; i < 3; ++i) CHECK_OK(core->malloc(core->create_slot(), 1, kFirst, false));
  CHECK(driver->questions() == 1);
}

// --- a broken context ---

TEST_CASE("a_broken_context_is_remembered_with_its_cause") {
  const auto driver = make_host();
  const CorePtr core = make_core(driver);
  Segments segments(*core, 2, 1);
  const Claim claim(*core, segments.ids());
  REQUIRE_OK(segments.sleep());
  CHECK(core->broken().empty());
  const Stream stream(*driver, kSecond);
  const StreamHandle illegal = must(driver->create_stream(kFirst));
  REQUIRE_OK(driver->fill(segments.addresses()[0], 0, 8, illegal));
  CHECK_CODE(kContextBroken, core->wait_devices({kFirst}));
  CHECK(core->broken().find("illegal access") != std::string::npos);
  const std::string cause = core->broken();
  for (const Outcome& outcome : core->map(claim.ids())) CHECK_CODE(kContextBroken, outcome.status);
  CHECK_CODE(kContextBroken, core->malloc(segments.slot(), 1, kFirst, false));
  CHECK(core->broken() == cause);
  const HostRange view = must(core->host_view(segments.addresses()[1], kGranule));
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(view.data);
  CHECK((Bytes(bytes, bytes + kGranule) == segments.contents()[1]));
  CHECK_OK(core->malloc(segments.slot(), 1, kSecond, false));  // another device's context
}

// --- check_valid ---

TEST_CASE("check_valid_looks_at_table_arena_and_backups") {
  const CorePtr core = make_core(make_host());
  Segments segments(*core, 1, 1);
  const Claim claim(*core, segments.ids());
  const SegmentId id = segments.ids()[0];
  REQUIRE_OK(core->reserve_backup({{id, 0, 1024}}));
  CHECK(core->check_valid() == "");
  REQUIRE_OK(core->reserve_backup({{id, 512, 512}}));
  CHECK(core->check_valid().find("overlap") != std::string::npos);
}

}  // namespace cumem::testing
