// A core that many threads use at once: tensors come and go on any thread while one transition after another runs.
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core_helpers.h"
#include "driver/faulty_driver.h"
#include "driver/host_driver.h"

namespace cumem::testing {
namespace {

constexpr std::uint64_t kGranule = 16 * kKiB;
constexpr std::chrono::seconds kLong{30};

std::shared_ptr<HostDriver> make_host() {
  HostDriverOptions options;
  options.device_bytes = 8 * kMiB;
  options.granularity_bytes = kGranule;
  return must(HostDriver::create(options));
}

// doctest's macros cost much under sanitizers: threads count what went wrong and the test looks at the end.
struct Tally {
  std::atomic<int> bad{0};
  void expect(bool good) { bad += good ? 0 : 1; }
};

// What a program's threads do: segments are made and freed, tensors in them come and die later, on other threads.
class Traffic {
 public:
  Traffic(Core& core, Tally& tally) : core_(core), tally_(tally) {}

  void run(unsigned seed, int steps) {
    std::mt19937 random(seed);  // NOLINT: the same sequence every time
    const SlotId slot = core_.create_slot();
    for (int step = 0; step < steps; ++step) {
      const Device device{static_cast<int>(random() % 2)};
      auto address = core_.malloc(slot, 1 + random() % (3 * kGranule), device, false);
      if (!address.ok()) {
        tally_.expect(code_of(address) == Code::kOutOfDeviceMemory);
        drop_some();
        continue;
      }
      for (unsigned i = 0; i < random() % 3; ++i) {
        auto block = core_.add_block(address.value(), 512 * i, 1 + random() % 512);
        tally_.expect(block.ok());
        if (block.ok()) pass_on(std::move(block).value());
      }
      const auto info = core_.find(address.value());
      tally_.expect(info.has_value() && info->slot == slot);
      tally_.expect(core_.free(address.value()).ok());
      if (step % 3 == 0) drop_some();
      if (step % 7 == 0) look_around();
    }
  }

  void drop_all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.clear();
  }

 private:
  // To be dropped by whichever thread comes next.
  void pass_on(std::unique_ptr<BlockHold> block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.push_back(std::move(block));
  }

  void drop_some() {
    std::vector<std::unique_ptr<BlockHold>> dying;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (blocks_.size() > 8) dying.swap(blocks_);
    }
    dying.clear();
    tally_.expect(core_.reap().ok());
  }

  void look_around() {
    tally_.expect(core_.check_valid().empty());
    for (const SegmentInfo& info : core_.segments(std::nullopt)) static_cast<void>(core_.backup_bytes(info.id));
    static_cast<void>(core_.dead_bytes());
    static_cast<void>(core_.progress());
    static_cast<void>(core_.broken());
  }

  Core& core_;
  Tally& tally_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<BlockHold>> blocks_;
};

// Sleeps and wakes all segments that there are; its own ones must keep their contents.
void cycle(Core& core, const Segments& mine, Tally& tally) {
  Ids ids;
  for (const SegmentInfo& info : core.segments(std::nullopt)) ids.push_back(info.id);
  ids = core.claim(ids);
  const Extents extents = core.live_extents(ids);
  tally.expect(core.reserve_backup(extents).ok());
  tally.expect(core.save(extents).ok());
  tally.expect(core.wait_devices({kFirst, kSecond}).ok());
  tally.expect(all_ok(core.unmap(ids)));
  const auto view = core.host_view(mine.addresses()[0], 8);
  tally.expect(view.ok());
  for (const Outcome& outcome : core.map(ids)) {
    tally.expect(outcome.status.ok() || outcome.status.code() == Code::kOutOfDeviceMemory);
  }
  // The traffic may have taken the room of its own freed segments; those of ours come first in what is left.
  for (int i = 0; i < 1000 && !mine.all(SegmentState::kMoving); ++i) {
    tally.expect(core.reap().ok());
    static_cast<void>(core.map(mine.ids()));
  }
  tally.expect(core.restore(mine.extents()).ok());
  core.settle(ids);
  const auto now = get(core, mine.extents());
  tally.expect(now.ok() && now.value() == mine.contents());
  core.release_backup(extents, ids.size() % 2 == 0);
  core.unclaim(ids);
}

}  // namespace

TEST_CASE("tensors_come_and_go_on_every_thread_while_transitions_run") {
  const auto driver = make_host();
  {
    const CorePtr core = make_core(driver);
    Tally tally;
    Traffic traffic(*core, tally);
    Segments mine(*core, 3, 2 * kGranule);
    std::atomic<int> running{4};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        traffic.run(t + 1, 1500);
        --running;
      });
    }
    for (int cycles = 0; running > 0 || cycles < 10; ++cycles) cycle(*core, mine, tally);
    for (std::thread& thread : threads) thread.join();
    traffic.drop_all();
    CHECK(tally.bad.load() == 0);
    CHECK(core->check_valid() == "");
    mine.free_all();
    CHECK_OK(core->reap());
    CHECK(core->segments(std::nullopt).empty());
    CHECK(core->dead_bytes() == 0);
    CHECK(gives_all_back(*core));
    CHECK(core->arena().used_bytes() == 0);
  }
  CHECK(driver->counts() == DriverCounts{});
}

TEST_CASE("the_last_block_ends_a_core_on_any_thread") {
  const auto driver = make_host();
  for (int round = 0; round < 20; ++round) {
    CorePtr core = make_core(driver);
    const DeviceAddress address = must(core->malloc(core->create_slot(), 1, kFirst, false));
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      auto block = must(core->add_block(address, 0, 8));
      threads.emplace_back([held = std::move(block)]() mutable { held.reset(); });
    }
    CHECK_OK(core->free(address));
    core.reset();
    for (std::thread& thread : threads) thread.join();
    CHECK(driver->counts() == DriverCounts{});
  }
}

TEST_CASE("malloc_and_blocks_never_wait_for_a_transition") {
  const auto driver = std::make_shared<FaultyDriver>(make_host());
  const CorePtr core = make_core(driver);
  Segments asleep(*core, 1, 1);
  const SlotId slot = core->create_slot();
  CHECK_OK(core->free(must(core->malloc(slot, 1, kFirst, false))));
  for (const char* call : {"copy_to_host", "query_event", "unmap"}) {
    CAPTURE(call);
    REQUIRE_OK(driver->hold(call));
    std::thread transition([&] {
      const Claim claim(*core, asleep.ids());
      CHECK_OK(asleep.sleep());
      CHECK_OK(asleep.wake());
    });
    CHECK(driver->wait_held(call, kLong));
    const DeviceAddress address = must(core->malloc(slot, 1, kFirst, false));
    auto block = must(core->add_block(address, 0, 8));
    CHECK(core->segments(std::nullopt).size() == 2);
    CHECK(core->check_valid() == "");
    CHECK_OK(core->free(address));
    block.reset();
    CHECK(core->dead_bytes() == kGranule);
    driver->release_gate(call);
    transition.join();
    CHECK_OK(core->reap());
  }
  asleep.free_all();
}

TEST_CASE("a_segment_freed_during_its_own_transition_dies_after_it") {
  const auto driver = std::make_shared<FaultyDriver>(make_host());
  const CorePtr core = make_core(driver);
  Segments segments(*core, 1, 1);
  const DeviceAddress address = segments.addresses()[0];
  REQUIRE_OK(driver->hold("unmap"));
  std::thread transition([&] {
    const Claim claim(*core, segments.ids());
    CHECK(all_ok(core->unmap(claim.ids())));
  });
  CHECK(driver->wait_held("unmap", kLong));
  CHECK_OK(core->free(address));
  CHECK_CODE(kNotFound, core->free(address));
  CHECK(driver->counts().mappings == 1);
  driver->release_gate("unmap");
  transition.join();
  CHECK_OK(core->reap());
  CHECK(gives_all_back(*core));
}

}  // namespace cumem::testing
