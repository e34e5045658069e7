#include "core_conformance.h"

#include <limits>
#include <string>

#include "core_helpers.h"
#include "driver/faulty_driver.h"

namespace cumem::testing {
namespace {

using DriverPtr = std::shared_ptr<Driver>;

// --- malloc and free ---

void a_segment_is_resident_rounded_up_and_found(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const std::uint64_t g = granularity(*driver);
  const SlotId slot = core->create_slot();
  CHECK(core->create_slot() != slot);
  const DeviceAddress address = must(core->malloc(slot, g + 1, kFirst, false));
  const SegmentInfo info = *core->find(address + (2 * g - 1));
  CHECK(info.address == address);
  CHECK(info.size == 2 * g);
  CHECK(info.slot == slot);
  CHECK(info.device == kFirst);
  CHECK_FALSE(info.shareable);
  CHECK(info.state == SegmentState::kResident);
  CHECK(info.live_bytes == 2 * g);
  CHECK_FALSE(core->find(address + 2 * g).has_value());
  CHECK(core->segments(slot).size() == 1);
  CHECK(core->segments(std::nullopt).size() == 1);
  CHECK(core->segments(SlotId(slot.value + 100)).empty());
  CHECK_OK(core->free(address));
  CHECK_FALSE(core->find(address).has_value());
  CHECK(gives_all_back(*core));
}

void what_was_not_given_cannot_be_freed(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const DeviceAddress address = must(core->malloc(core->create_slot(), 1, kFirst, false));
  CHECK_CODE(kNotFound, core->free(address + 512));
  CHECK_CODE(kNotFound, core->free(DeviceAddress(0)));
  CHECK_OK(core->free(address));
  CHECK_CODE(kNotFound, core->free(address));
}

void sizes_and_devices_that_cannot_be_are_refused(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const SlotId slot = core->create_slot();
  const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  CHECK_CODE(kInvalidValue, core->malloc(slot, 0, kFirst, false));
  CHECK_CODE(kInvalidValue, core->malloc(slot, most, kFirst, false));
  CHECK_CODE(kInvalidValue, core->malloc(slot, 1, Device{-1}, false));
  CHECK_CODE(kInvalidValue, core->malloc(slot, 1, Device{driver->device_count()}, false));
  CHECK(core->segments(std::nullopt).empty());
  CHECK(gives_all_back(*core));
}

void a_segment_larger_than_the_device_is_out_of_memory_with_numbers(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const SlotId slot = core->create_slot();
  const std::uint64_t g = granularity(*driver);
  const std::uint64_t size = (must(driver->properties(kFirst)).total_bytes / g + 1) * g;
  const Status status = core->malloc(slot, size, kFirst, false).status();
  CHECK_CODE(kOutOfDeviceMemory, status);
  CHECK(status.needed_bytes() == size);
  CHECK(status.free_bytes() < size);
  CHECK(gives_all_back(*core));
  CHECK(core->broken().empty());
  CHECK_OK(core->free(must(core->malloc(slot, 1, kFirst, false))));
}

void a_core_that_ends_gives_back_what_was_not_freed(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const Segments segments(*core, 3, 1);
  const Claim claim(*core, {segments.ids()[1]});
  REQUIRE_OK(core->reserve_backup({segments.extents()[1]}));
  CHECK(all_ok(core->unmap(claim.ids())));
  // run_case compares the counts
}

// --- blocks ---

void a_block_keeps_a_freed_segment_until_a_reap(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const DeviceAddress address = must(core->malloc(core->create_slot(), 1, kFirst, false));
  const std::uint64_t size = core->find(address)->size;
  auto block = must(core->add_block(address, 512, 100));
  CHECK(block->address() == address + 512);
  CHECK(block->size() == 100);
  CHECK(block->device() == kFirst);
  CHECK_OK(core->free(address));
  CHECK(core->find(address)->live_bytes == 512);
  CHECK(must(core->reap()) == 0);
  block.reset();
  CHECK_FALSE(core->find(address).has_value());
  CHECK(core->dead_bytes() == size);
  CHECK(driver->counts().mappings == 1);  // the drop called no driver
  CHECK(must(core->reap()) == size);
  CHECK(core->dead_bytes() == 0);
  CHECK(gives_all_back(*core));
}

void blocks_outlive_whoever_made_the_core(const DriverPtr& driver) {
  CorePtr core = make_core(driver);
  const DeviceAddress address = must(core->malloc(core->create_slot(), 1, kFirst, false));
  auto block = must(core->add_block(address, 0, 8));
  CHECK_OK(core->free(address));
  core.reset();
  CHECK(driver->counts().mappings == 1);
  block.reset();
  CHECK(driver->counts().mappings == 0);
}

void a_block_lies_in_a_living_segment(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const DeviceAddress address = must(core->malloc(core->create_slot(), 1, kFirst, false));
  const std::uint64_t size = core->find(address)->size;
  CHECK_CODE(kInvalidValue, core->add_block(address, size, 1));
  CHECK_CODE(kInvalidValue, core->add_block(address, 0, 0));
  CHECK_CODE(kNotFound, core->add_block(address + 512, 0, 1));
  CHECK_OK(core->free(address));
  CHECK_CODE(kNotFound, core->add_block(address, 0, 1));
}

// --- transitions ---

void contents_come_back_at_the_same_addresses(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const std::uint64_t g = granularity(*driver);
  Segments segments(*core, 3, 2 * g);
  {
    const Claim claim(*core, segments.ids());
    for (int round = 0; round < 2; ++round) {
      const DriverCounts before = driver->counts();
      REQUIRE_OK(segments.sleep());
      CHECK(segments.all(SegmentState::kAsleep));
      CHECK(driver->counts().mappings == before.mappings - 3);
      CHECK(driver->counts().physical_bytes == before.physical_bytes - 6 * g);
      CHECK(driver->counts().ranges == before.ranges);
      CHECK(core->find(segments.addresses()[0])->mapped_bytes() == 0);
      REQUIRE_OK(segments.wake());
      CHECK(segments.all(SegmentState::kResident));
      segments.check_contents();
    }
    CHECK(core->backup_bytes(segments.ids()[0]) == 2 * g);  // kept until the caller says otherwise
    core->release_backup(segments.extents(), false);
    CHECK(core->backup_bytes(segments.ids()[0]) == 0);
    CHECK(core->arena().bytes() == 0);
  }
  segments.free_all();
  CHECK(gives_all_back(*core));
}

void only_saved_extents_come_back(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  Segments segments(*core, 1, 1);
  const SegmentId id = segments.ids()[0];
  const Extents saved{{id, 512, 1000}, {id, 4096, 512}};
  {
    const Claim claim(*core, segments.ids());
    REQUIRE_OK(core->reserve_backup(saved));
    REQUIRE_OK(core->save(saved));
    CHECK(all_ok(core->unmap({id})));
    CHECK(all_ok(core->map({id})));
    CHECK(segments.state(0) == SegmentState::kMoving);
    REQUIRE_OK(core->fill(segments.extents(), 0));
    REQUIRE_OK(core->restore(saved));
    core->settle({id});
    Bytes expected(segments.extents()[0].length, 0);
    const Bytes& before = segments.contents()[0];
    std::copy(before.begin() + 512, before.begin() + 1512, expected.begin() + 512);
    std::copy(before.begin() + 4096, before.begin() + 4608, expected.begin() + 4096);
    CHECK((must(get(*core, segments.extents()))[0] == expected));
  }
  segments.free_all();
}

void an_asleep_segments_backup_can_be_looked_at(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  Segments segments(*core, 2, 1);
  HostRange view;
  {
    const Claim claim(*core, segments.ids());
    REQUIRE_OK(segments.sleep());
    view = must(core->host_view(segments.addresses()[1] + 100, 1000));
    CHECK_CODE(kNotFound, core->host_view(segments.addresses()[1] + 100, segments.extents()[1].length));
    CHECK_CODE(kNotFound, core->host_view(DeviceAddress(0), 8));
  }
  segments.free_all();  // the view keeps its memory
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(view.data);
  const Bytes& before = segments.contents()[1];
  CHECK(Bytes(bytes, bytes + 1000) == Bytes(before.begin() + 100, before.begin() + 1100));
}

void a_freed_segment_that_is_claimed_dies_with_the_claim(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  Segments segments(*core, 2, 1);
  const Ids ids = segments.ids();
  const std::uint64_t size = segments.extents()[0].length;
  {
    const Claim claim(*core, ids);
    REQUIRE_OK(core->reserve_backup(segments.extents()));
    segments.free_all();
    CHECK(core->segments(std::nullopt).empty());
    CHECK(driver->counts().mappings == 2);
    CHECK_OK(core->save(segments.extents()));  // the transition goes on
    CHECK(all_ok(core->unmap({ids[0]})));
    CHECK(must(core->reap()) == 0);
    CHECK(core->claim(ids).empty());
  }
  CHECK(core->dead_bytes() == size);  // the other one gave its pages back already
  CHECK(must(core->reap()) == size);
  CHECK(gives_all_back(*core));
  CHECK(core->arena().used_bytes() == 0);
}

void segments_are_freed_in_every_state(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  Segments segments(*core, 3, 1);
  {
    const Claim claim(*core, segments.ids());
    CHECK(all_ok(core->unmap({segments.ids()[1], segments.ids()[2]})));
    CHECK(all_ok(core->map({segments.ids()[2]})));
  }
  CHECK(segments.state(0) == SegmentState::kResident);
  CHECK(segments.state(1) == SegmentState::kAsleep);
  CHECK(segments.state(2) == SegmentState::kMoving);
  segments.free_all();
  CHECK(gives_all_back(*core));
}

void transitions_touch_only_claimed_segments_in_the_right_state(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  Segments segments(*core, 2, 1);
  const Ids first{segments.ids()[0]};
  const Extents extent{segments.extents()[0]};
  CHECK(core->unmap(segments.ids()).empty());
  {
    const Claim claim(*core, first);
    CHECK(core->map(segments.ids()).empty());
    core->settle(segments.ids());
    CHECK(core->unmap(segments.ids()).size() == 1);
    CHECK(core->unmap(segments.ids()).empty());
    CHECK(segments.state(1) == SegmentState::kResident);
    core->settle(first);  // not while it is asleep
    CHECK(segments.state(0) == SegmentState::kAsleep);
    CHECK(core->map(segments.ids()).size() == 1);
    core->settle(first);
    CHECK(segments.state(0) == SegmentState::kResident);
  }
  segments.free_all();
}

void copies_are_refused_where_they_cannot_be_done(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  Segments segments(*core, 2, 1);
  const SegmentId id = segments.ids()[0];
  const std::uint64_t size = segments.extents()[0].length;
  std::vector<Bytes> bytes{Bytes(size)};
  CHECK_CODE(kNotFound, put(*core, {{id, 0, 8}}, bytes));  // not claimed
  {
    const Claim claim(*core, {id});
    const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
    CHECK_CODE(kInvalidValue, put(*core, {{id, size, 1}}, bytes));
    CHECK_CODE(kInvalidValue, put(*core, {{id, 1, size}}, bytes));
    CHECK_CODE(kInvalidValue, put(*core, {{id, 8, most}}, bytes));
    CHECK_CODE(kInvalidValue, put(*core, {{id, most, 8}}, bytes));
    CHECK_CODE(kInvalidValue, put(*core, {{id, 0, 8}, {id, 8, 8}}, bytes));  // one buffer for two
    CHECK_CODE(kNotFound, put(*core, {segments.extents()[1]}, bytes));
    CHECK_OK(put(*core, {{id, size, 0}}, bytes));
    CHECK_CODE(kNotFound, core->save({{id, 0, 8}}));  // not reserved
    CHECK_CODE(kNotFound, core->restore({{id, 0, 8}}));
    CHECK(all_ok(core->unmap({id})));
    CHECK_CODE(kWrongState, put(*core, {{id, 0, 8}}, bytes));
    CHECK_CODE(kWrongState, core->fill({{id, 0, 8}}, 0));
    REQUIRE_OK(core->reserve_backup({{id, 0, 8}}));
    CHECK_CODE(kWrongState, core->save({{id, 0, 8}}));
  }
  segments.free_all();
}

void backups_are_reserved_only_for_extents_of_claimed_segments(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  Segments segments(*core, 2, 1);
  const SegmentId id = segments.ids()[0];
  const std::uint64_t size = segments.extents()[0].length;
  {
    const Claim claim(*core, {id});
    CHECK_CODE(kNotFound, core->reserve_backup({{id, 0, 8}, segments.extents()[1]}));
    CHECK_CODE(kNotFound, core->reserve_backup({{SegmentId(~0ull), 0, 8}}));
    CHECK_CODE(kInvalidValue, core->reserve_backup({{id, 0, 8}, {id, 1, size}}));
    CHECK_CODE(kInvalidValue, core->reserve_backup({{id, 8, 0}}));
    CHECK(core->arena().bytes() == 0);
  }
  segments.free_all();
}

void shareable_segments_keep_their_properties(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const SlotId slot = core->create_slot();
  if (!must(driver->properties(kFirst)).exportable) {
    CHECK_CODE(kUnsupported, core->malloc(slot, 1, kFirst, true));
    return;
  }
  const DeviceAddress address = must(core->malloc(slot, 1, kFirst, true));
  CHECK(core->find(address)->shareable);
  {
    const Claim claim(*core, {core->find(address)->id});
    CHECK(all_ok(core->unmap(claim.ids())));
    CHECK(all_ok(core->map(claim.ids())));
    core->settle(claim.ids());
  }
  CHECK_OK(core->free(address));
}

void a_wake_gives_pages_only_to_the_backing(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const std::uint64_t g = granularity(*driver);
  Segments segments(*core, 1, 6 * g);
  const SegmentId id = segments.ids()[0];
  const Bytes& before = segments.contents()[0];
  const Extents live{{id, 0, 100}, {id, 3 * g - 512, 1024}};
  {
    const Claim claim(*core, {id});
    REQUIRE_OK(core->reserve_backup(live));
    REQUIRE_OK(core->save(live));
    CHECK(all_ok(core->unmap({id})));
    REQUIRE_OK(core->set_backing(id, {{0, 100}, {3 * g - 512, 1024}}));
    CHECK(core->find(segments.addresses()[0])->backing_bytes == 3 * g);
    CHECK(all_ok(core->map({id})));
    REQUIRE_OK(core->restore(live));
    core->settle({id});
    CHECK(driver->counts().mappings == 2);  // one handle a run
    CHECK(driver->counts().physical_bytes == 3 * g);
    CHECK(core->find(segments.addresses()[0])->mapped_bytes() == 3 * g);
    const auto now = must(get(*core, live));
    CHECK(now[0] == Bytes(before.begin(), before.begin() + 100));
    const auto middle = before.begin() + static_cast<std::ptrdiff_t>(3 * g - 512);
    CHECK(now[1] == Bytes(middle, middle + 1024));
    CHECK_CODE(kInvalidValue, core->fill({{id, g, 8}}, 0));  // in the hole
    CHECK_CODE(kInvalidValue, core->fill({{id, 0, g + 1}}, 0));
    CHECK_CODE(kInvalidValue, core->fill({{id, 4 * g, 8}}, 0));
    CHECK(broken_law(*core) == "");
    CHECK(all_ok(core->unmap({id})));
    CHECK(driver->counts().physical_bytes == 0);
    REQUIRE_OK(core->set_backing(id, {{0, 6 * g}}));
    CHECK(all_ok(core->map({id})));
    CHECK_OK(core->fill({{id, 0, 6 * g}}, 0));
  }
  segments.free_all();
  CHECK(gives_all_back(*core));
}

void a_dead_segment_with_holes_gives_back_what_it_holds(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const std::uint64_t g = granularity(*driver);
  Segments segments(*core, 1, 4 * g);
  const SegmentId id = segments.ids()[0];
  {
    const Claim claim(*core, {id});
    CHECK(all_ok(core->unmap({id})));
    REQUIRE_OK(core->set_backing(id, {{0, g}, {2 * g, g}}));
    CHECK(all_ok(core->map({id})));
    core->settle({id});
    segments.free_all();
  }
  CHECK(core->dead_bytes() == 2 * g);
  CHECK(must(core->reap()) == 2 * g);
  CHECK(gives_all_back(*core));
}

void only_private_asleep_segments_change_their_backing(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const std::uint64_t g = granularity(*driver);
  const SlotId slot = core->create_slot();
  std::vector<DeviceAddress> addresses{must(core->malloc(slot, 4 * g, kFirst, false)),
                                       must(core->malloc(slot, 4 * g, kFirst, false, true))};
  if (must(driver->properties(kFirst)).exportable) {
    addresses.push_back(must(core->malloc(slot, 4 * g, kFirst, true)));
  }
  Ids ids;
  for (const DeviceAddress address : addresses) ids.push_back(core->find(address)->id);
  CHECK(core->find(addresses[1])->captured);
  CHECK_CODE(kNotFound, core->set_backing(ids[0], {{0, g}}));
  {
    const Claim claim(*core, ids);
    CHECK_CODE(kWrongState, core->set_backing(ids[0], {{0, g}}));  // resident
    CHECK(all_ok(core->unmap(ids)));
    CHECK_OK(core->set_backing(ids[0], {{0, g}}));
    for (std::size_t i = 1; i < ids.size(); ++i) CHECK_CODE(kWrongState, core->set_backing(ids[i], {{0, g}}));
    const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
    CHECK_CODE(kInvalidValue, core->set_backing(ids[0], {{4 * g, 1}}));
    CHECK_CODE(kInvalidValue, core->set_backing(ids[0], {{1, 4 * g}}));
    CHECK_CODE(kInvalidValue, core->set_backing(ids[0], {{8, most}}));
    CHECK_CODE(kInvalidValue, core->set_backing(ids[0], {{2 * g, g}, {0, g}}));
    CHECK_CODE(kInvalidValue, core->set_backing(ids[0], {{0, 2 * g}, {g, g}}));
    CHECK(core->find(addresses[0])->backing_bytes == g);
  }
}

void a_free_for_later_calls_no_driver(const DriverPtr& driver) {
  const CorePtr core = make_core(driver);
  const std::uint64_t g = granularity(*driver);
  const DeviceAddress address = must(core->malloc(core->create_slot(), 1, kFirst, false));
  CHECK_OK(core->free_later(address));
  CHECK_FALSE(core->find(address).has_value());
  CHECK_CODE(kNotFound, core->free(address));
  CHECK_CODE(kNotFound, core->free_later(address));
  CHECK(core->dead_bytes() == g);
  CHECK(driver->counts().mappings == 1);
  CHECK(must(core->reap(true)) == g);
  CHECK(gives_all_back(*core));
}

void two_devices_sleep_in_one_transition(const DriverPtr& driver) {
  if (driver->device_count() < 2) return;
  const CorePtr core = make_core(driver);
  Segments first(*core, 2, 1, kFirst);
  Segments second(*core, 2, 1, kSecond);
  CHECK(core->find(second.addresses()[0])->device == kSecond);
  Ids ids = first.ids();
  ids.insert(ids.end(), second.ids().begin(), second.ids().end());
  Extents extents = first.extents();
  extents.insert(extents.end(), second.extents().begin(), second.extents().end());
  {
    const Claim claim(*core, ids);
    REQUIRE_OK(core->reserve_backup(extents));
    REQUIRE_OK(core->save(extents));
    REQUIRE_OK(core->wait_devices({kSecond, kFirst}));
    CHECK(all_ok(core->unmap(ids)));
    CHECK(second.all(SegmentState::kAsleep));
    CHECK(all_ok(core->map(ids)));
    REQUIRE_OK(core->restore(extents));
    core->settle(ids);
    first.check_contents();
    second.check_contents();
  }
  first.free_all();
  second.free_all();
  CHECK(gives_all_back(*core));
}

}  // namespace

#define CASE(name) \
  CoreCase { #name, name }

const std::vector<CoreCase>& core_cases() {
  static const std::vector<CoreCase> cases = {
      CASE(a_segment_is_resident_rounded_up_and_found),
      CASE(what_was_not_given_cannot_be_freed),
      CASE(sizes_and_devices_that_cannot_be_are_refused),
      CASE(a_segment_larger_than_the_device_is_out_of_memory_with_numbers),
      CASE(a_core_that_ends_gives_back_what_was_not_freed),
      CASE(a_block_keeps_a_freed_segment_until_a_reap),
      CASE(blocks_outlive_whoever_made_the_core),
      CASE(a_block_lies_in_a_living_segment),
      CASE(contents_come_back_at_the_same_addresses),
      CASE(only_saved_extents_come_back),
      CASE(an_asleep_segments_backup_can_be_looked_at),
      CASE(a_freed_segment_that_is_claimed_dies_with_the_claim),
      CASE(segments_are_freed_in_every_state),
      CASE(transitions_touch_only_claimed_segments_in_the_right_state),
      CASE(copies_are_refused_where_they_cannot_be_done),
      CASE(backups_are_reserved_only_for_extents_of_claimed_segments),
      CASE(shareable_segments_keep_their_properties),
      CASE(a_wake_gives_pages_only_to_the_backing),
      CASE(a_dead_segment_with_holes_gives_back_what_it_holds),
      CASE(only_private_asleep_segments_change_their_backing),
      CASE(a_free_for_later_calls_no_driver),
      CASE(two_devices_sleep_in_one_transition),
  };
  return cases;
}

void run_case(const CoreCase& core_case, const std::shared_ptr<Driver>& driver) {
  const DriverCounts before = driver->counts();
  core_case.run(driver);
  CHECK(driver->counts() == before);
}

// --- faults ---

namespace {

// One sleep and one wake with call k failing `times` times. How many calls failed.
std::uint64_t fail_one_transition(const DriverPtr& driver, std::int64_t k, Code code, std::int64_t times) {
  const auto faulty = std::make_shared<FaultyDriver>(driver);
  const CorePtr core = make_core(faulty);
  Segments segments(*core, 2, 1);
  std::uint64_t failed = 0;
  {
    const Claim claim(*core, segments.ids());
    REQUIRE_OK(faulty->fail_at(k, code, times));
    Status status = segments.sleep();
    if (status.ok()) status = segments.wake();
    failed = faulty->failed();
    faulty->clear();
    CHECK(broken_law(*core) == "");
    // Whatever happened: a second attempt at what is left to do works, and the contents are there.
    if (!segments.all(SegmentState::kResident)) REQUIRE_OK(segments.wake());
    CHECK(segments.all(SegmentState::kResident));
    segments.check_contents();
  }
  CHECK(broken_law(*core) == "");
  segments.free_all();
  CHECK_OK(core->reap());
  CHECK(gives_all_back(*core));
  return failed;
}

}  // namespace

void fail_every_call_of_a_sleep_and_a_wake(const std::shared_ptr<Driver>& driver) {
  for (const Code code : {Code::kDriver, Code::kOutOfDeviceMemory}) {
    for (const std::int64_t times : {1, 2}) {
      const DriverCounts before = driver->counts();
      std::int64_t k = 0;
      for (std::uint64_t failed = 1; failed > 0; ++k) {
        CAPTURE(code);
        CAPTURE(times);
        CAPTURE(k);
        REQUIRE(k < 1000);
        failed = fail_one_transition(driver, k, code, times);
      }
      CHECK(k > 15);
      CHECK(driver->counts() == before);
    }
  }
}

}  // namespace cumem::testing
