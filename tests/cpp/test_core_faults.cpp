// Every k-th driver call of every operation made to fail: no leak, a legal state, contents intact, a retry works.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "core_conformance.h"
#include "core_helpers.h"
#include "driver/faulty_driver.h"
#include "driver/host_driver.h"

namespace cumem::testing {
namespace {

constexpr std::uint64_t kGranule = 64 * kKiB;
constexpr std::int64_t kForever = FaultyDriver::kForever;

// A small machine, a core on it, faults between them.
struct Bench {
  Bench() {
    HostDriverOptions options;
    options.device_bytes = 4 * kMiB;
    options.granularity_bytes = kGranule;
    driver = std::make_shared<FaultyDriver>(must(HostDriver::create(options)));
    core = make_core(driver);
  }
  std::shared_ptr<FaultyDriver> driver;
  CorePtr core;
};

// Runs `episode(bench, order, disarm)` on a fresh bench for every k: between `order()` and `disarm()` call k fails.
// Ends with the first k that no call reaches; an operation with fewer calls than `calls` was not the one that was
// meant.
template <typename Episode>
void for_every_call(std::int64_t calls, Episode episode) {
  for (const Code code : {Code::kDriver, Code::kOutOfDeviceMemory, Code::kContextBroken}) {
    for (const std::int64_t times : {std::int64_t{1}, std::int64_t{2}, kForever}) {
      bool reached = true;
      std::int64_t k = 0;
      for (; reached; ++k) {
        CAPTURE(code);
        CAPTURE(times);
        CAPTURE(k);
        REQUIRE(k < 1000);
        Bench bench;
        const auto order = [&] {
          bench.driver->clear();
          REQUIRE_OK(bench.driver->fail_at(k, code, times));
        };
        std::uint64_t failed = 0;
        const auto disarm = [&] {
          failed = bench.driver->failed();
          bench.driver->clear();
          CHECK(broken_law(*bench.core) == "");
        };
        episode(bench, order, disarm);
        reached = failed > 0;
        const DriverCounts counts = bench.driver->counts();
        CHECK(counts.handles == 0);
        CHECK(counts.ranges == 0);
        CHECK(counts.mappings == 0);
      }
      CHECK(k > calls);
    }
  }
}

void end_all(Bench& bench, Segments& segments) {
  segments.free_all();
  CHECK_OK(bench.core->reap());
}

// What is mapped agrees with the states: resident and moving segments are, asleep ones are not, lost ones may be.
void check_mappings(const Bench& bench, const Segments& segments) {
  std::uint64_t mapped = 0;
  std::uint64_t lost = 0;
  for (std::size_t i = 0; i < segments.ids().size(); ++i) {
    const SegmentState state = segments.state(i);
    lost += state == SegmentState::kLost ? 1 : 0;
    mapped += state == SegmentState::kResident || state == SegmentState::kMoving ? 1 : 0;
  }
  CHECK(bench.driver->counts().mappings >= mapped);
  CHECK(bench.driver->counts().mappings <= mapped + lost);
}

// Each outcome agrees with what the segment is now.
void check_outcomes_of_unmap(const Segments& segments, const std::vector<Outcome>& outcomes) {
  REQUIRE(outcomes.size() == segments.ids().size());
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    CHECK(outcomes[i].segment == segments.ids()[i]);
    const SegmentState state = segments.state(i);
    CHECK(state != SegmentState::kMoving);
    if (outcomes[i].status.ok()) CHECK(state == SegmentState::kAsleep);
    if (state == SegmentState::kResident) CHECK_FALSE(outcomes[i].status.ok());
  }
}

void check_outcomes_of_map(const Segments& segments, const std::vector<Outcome>& outcomes) {
  REQUIRE(outcomes.size() == segments.ids().size());
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    const SegmentState state = segments.state(i);
    CHECK((state == SegmentState::kMoving) == outcomes[i].status.ok());
    CHECK(state != SegmentState::kResident);
  }
}

}  // namespace

TEST_CASE("a_sleep_and_a_wake_survive_the_failure_of_any_call") {
  HostDriverOptions options;
  options.device_bytes = 4 * kMiB;
  options.granularity_bytes = kGranule;
  fail_every_call_of_a_sleep_and_a_wake(must(HostDriver::create(options)));
}

TEST_CASE("a_malloc_with_any_call_failing_gives_a_segment_or_nothing") {
  for_every_call(4, [](Bench& bench, auto order, auto disarm) {
    order();
    const auto made = bench.core->malloc(bench.core->create_slot(), 3 * kGranule, kFirst, false);
    const auto infos = bench.core->segments(std::nullopt);
    disarm();
    CHECK(infos.size() == (made.ok() ? 1 : 0));
    if (made.ok()) {
      CHECK(infos[0].state == SegmentState::kResident);
      CHECK_OK(bench.core->free(made.value()));
    }
    CHECK_OK(bench.core->reap());
    CHECK_OK(bench.core->free(must(bench.core->malloc(bench.core->create_slot(), 4 * kMiB, kFirst, false))));
  });
}

TEST_CASE("a_free_with_any_call_failing_is_ended_by_the_next_reap") {
  for_every_call(4, [](Bench& bench, auto order, auto disarm) {
    const DeviceAddress address = must(bench.core->malloc(bench.core->create_slot(), 1, kFirst, false));
    order();
    const Status status = bench.core->free(address);
    CHECK(status.ok() == (bench.driver->failed() == 0));
    CHECK_FALSE(bench.core->find(address).has_value());
    disarm();
    CHECK_CODE(kNotFound, bench.core->free(address));
    CHECK_OK(bench.core->reap());
    CHECK(bench.core->dead_bytes() == 0);
  });
}

TEST_CASE("a_reap_with_any_call_failing_is_ended_by_the_next") {
  for_every_call(7, [](Bench& bench, auto order, auto disarm) {
    for (int i = 0; i < 2; ++i) {
      const DeviceAddress address = must(bench.core->malloc(bench.core->create_slot(), 1, kFirst, false));
      const auto block = must(bench.core->add_block(address, 0, 1));
      CHECK_OK(bench.core->free(address));
    }
    order();
    const auto reaped = bench.core->reap();
    CHECK(reaped.ok() == (bench.driver->failed() == 0));
    disarm();
    CHECK_OK(bench.core->reap());
    CHECK(bench.core->dead_bytes() == 0);
  });
}

TEST_CASE("an_unmap_with_any_call_failing_leaves_each_segment_asleep_or_as_it_was_or_lost") {
  for_every_call(6, [](Bench& bench, auto order, auto disarm) {
    Segments segments(*bench.core, 3, 1);
    {
      const Claim claim(*bench.core, segments.ids());
      REQUIRE_OK(bench.core->reserve_backup(segments.extents()));
      REQUIRE_OK(bench.core->save(segments.extents()));
      order();
      check_outcomes_of_unmap(segments, bench.core->unmap(segments.ids()));
      check_mappings(bench, segments);
      disarm();
      CHECK(all_ok(bench.core->unmap(segments.ids())));
      CHECK(segments.all(SegmentState::kAsleep));
      REQUIRE_OK(segments.wake());
      segments.check_contents();
      CHECK(bench.driver->counts().physical_bytes == 3 * kGranule);  // pages kept back are gone by now
    }
    end_all(bench, segments);
  });
}

TEST_CASE("a_map_with_any_call_failing_leaves_each_segment_moving_or_asleep_or_lost") {
  for_every_call(9, [](Bench& bench, auto order, auto disarm) {
    Segments segments(*bench.core, 3, 1);
    {
      const Claim claim(*bench.core, segments.ids());
      REQUIRE_OK(segments.sleep());
      order();
      check_outcomes_of_map(segments, bench.core->map(segments.ids()));
      check_mappings(bench, segments);
      disarm();
      REQUIRE_OK(segments.wake());  // maps those that failed
      CHECK(segments.all(SegmentState::kResident));
      segments.check_contents();
    }
    end_all(bench, segments);
  });
}

TEST_CASE("segments_of_several_handles_survive_the_failure_of_any_call_too") {
  for (const bool map : {false, true}) {
    for_every_call(map ? 9 : 6, [map](Bench& bench, auto order, auto disarm) {
      Segments segments(*bench.core, 1, 6 * kGranule);
      const SegmentId id = segments.ids()[0];
      const Extents live{{id, 0, kGranule}, {id, 2 * kGranule, kGranule}, {id, 4 * kGranule, kGranule}};
      {
        const Claim claim(*bench.core, {id});
        REQUIRE_OK(bench.core->reserve_backup(live));
        REQUIRE_OK(bench.core->save(live));
        const auto before = must(get(*bench.core, live));
        CHECK(all_ok(bench.core->unmap({id})));
        std::vector<Run> runs;
        for (const Extent& extent : live) runs.push_back({extent.offset, extent.length});
        REQUIRE_OK(bench.core->set_backing(id, runs));
        if (!map) CHECK(all_ok(bench.core->map({id})));
        order();
        const auto outcomes = map ? bench.core->map({id}) : bench.core->unmap({id});
        const SegmentState state = segments.state(0);
        if (outcomes[0].status.ok()) CHECK(state == (map ? SegmentState::kMoving : SegmentState::kAsleep));
        disarm();
        if (map && state != SegmentState::kMoving) CHECK(all_ok(bench.core->map({id})));
        if (!map && state != SegmentState::kAsleep) CHECK(all_ok(bench.core->unmap({id})));
        if (!map) CHECK(all_ok(bench.core->map({id})));
        CHECK_OK(bench.core->reap());  // pages that a first attempt could not give back
        CHECK(bench.driver->counts().physical_bytes == 3 * kGranule);
        REQUIRE_OK(bench.core->restore(live));
        bench.core->settle({id});
        CHECK((must(get(*bench.core, live)) == before));
      }
      end_all(bench, segments);
    });
  }
}

TEST_CASE("an_unmap_whose_releases_fail_still_unmaps_every_run") {
  Bench bench;
  Segments segments(*bench.core, 1, 6 * kGranule);
  const SegmentId id = segments.ids()[0];
  {
    const Claim claim(*bench.core, {id});
    CHECK(all_ok(bench.core->unmap({id})));
    REQUIRE_OK(bench.core->set_backing(id, {{0, kGranule}, {2 * kGranule, kGranule}, {4 * kGranule, kGranule}}));
    CHECK(all_ok(bench.core->map({id})));
    REQUIRE_OK(bench.driver->fail_at(0, Code::kDriver, kForever, "release"));
    CHECK_FALSE(all_ok(bench.core->unmap({id})));
    CHECK(segments.state(0) == SegmentState::kAsleep);
    CHECK(bench.driver->counts().mappings == 0);
    CHECK(bench.driver->counts().physical_bytes == 3 * kGranule);
    CHECK_CODE(kDriver, bench.core->reap());
    bench.driver->clear();
    CHECK(must(bench.core->reap()) == 3 * kGranule);
  }
  end_all(bench, segments);
}

TEST_CASE("what_a_failed_map_or_unmap_left_can_be_freed_at_once") {
  for (const bool map : {false, true}) {
    for_every_call(map ? 6 : 4, [map](Bench& bench, auto order, auto disarm) {
      Segments segments(*bench.core, 2, 1);
      {
        const Claim claim(*bench.core, segments.ids());
        if (map) CHECK(all_ok(bench.core->unmap(segments.ids())));
        order();
        static_cast<void>(map ? bench.core->map(segments.ids()) : bench.core->unmap(segments.ids()));
        disarm();
      }
      end_all(bench, segments);
    });
  }
}

TEST_CASE("a_save_with_any_call_failing_harms_neither_contents_nor_a_second_save") {
  for_every_call(8, [](Bench& bench, auto order, auto disarm) {
    Segments segments(*bench.core, 3, 1);
    {
      const Claim claim(*bench.core, segments.ids());
      order();
      Status status = bench.core->reserve_backup(segments.extents());
      if (status.ok()) status = bench.core->save(segments.extents());
      disarm();
      CHECK(segments.all(SegmentState::kResident));
      segments.check_contents();
      REQUIRE_OK(segments.sleep());
      REQUIRE_OK(segments.wake());
      segments.check_contents();
    }
    end_all(bench, segments);
  });
}

TEST_CASE("a_restore_with_any_call_failing_can_be_repeated") {
  for_every_call(7, [](Bench& bench, auto order, auto disarm) {
    Segments segments(*bench.core, 3, 1);
    {
      const Claim claim(*bench.core, segments.ids());
      REQUIRE_OK(segments.sleep());
      CHECK(all_ok(bench.core->map(segments.ids())));
      order();
      const Status status = bench.core->restore(segments.extents());
      if (bench.driver->failed() == 0) CHECK_OK(status);
      disarm();
      CHECK(segments.all(SegmentState::kMoving));
      REQUIRE_OK(bench.core->restore(segments.extents()));
      bench.core->settle(segments.ids());
      segments.check_contents();
    }
    end_all(bench, segments);
  });
}

TEST_CASE("a_core_that_ends_with_any_call_failing_calls_the_driver_in_order_and_leaks_at_most_what_failed") {
  for (std::int64_t k = 0; k < 12; ++k) {
    CAPTURE(k);
    Bench bench;
    {
      const Segments segments(*bench.core, 2, 1);
      const Claim claim(*bench.core, segments.ids());
      REQUIRE_OK(bench.core->reserve_backup(segments.extents()));
    }
    bench.driver->clear();
    REQUIRE_OK(bench.driver->fail_at(k, Code::kDriver));
    bench.core.reset();
    CHECK_OK(bench.driver->inner()->synchronize(kFirst));
    const DriverCounts counts = bench.driver->counts();
    if (k == 0) {  // the wait itself: nothing may be touched
      CHECK(counts.mappings == 2);
      continue;
    }
    CHECK(counts.mappings + counts.ranges + counts.handles + counts.registrations + counts.events + counts.streams <=
          2);
  }
}

TEST_CASE("a_lost_segment_that_is_freed_counts_until_its_pages_are_back") {
  Bench bench;
  Segments segments(*bench.core, 1, 1);
  {
    const Claim claim(*bench.core, segments.ids());
    REQUIRE_OK(bench.driver->fail_at(0, Code::kContextBroken, 1, "unmap"));
    CHECK_FALSE(all_ok(bench.core->unmap(segments.ids())));
    CHECK(segments.state(0) == SegmentState::kLost);
    bench.driver->clear();
    segments.free_all();
  }
  CHECK(bench.core->dead_bytes() == kGranule);
  CHECK(must(bench.core->reap()) == kGranule);
}

}  // namespace cumem::testing
