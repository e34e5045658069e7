// The table of segments: who finds one, who still needs it, when it dies. Under random use, against a plain model.
#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "driver/host_driver.h"
#include "driver_helpers.h"
#include "segment_table.h"

namespace cumem::testing {
namespace {

constexpr std::uint64_t kGranule = 64 * kKiB;
constexpr SlotId kSlot{7};

// Segments without pages: asleep, which is all that the table needs. Their addresses end with the last pointer.
class Maker {
 public:
  Maker() {
    HostDriverOptions options;
    options.device_bytes = 16 * kMiB;
    options.granularity_bytes = kGranule;
    driver_ = must(HostDriver::create(options));
  }

  SegmentPtr make(std::uint64_t size = kGranule, SlotId slot = kSlot) {
    auto segment = std::make_shared<Segment>();
    segment->id = SegmentId(++last_id_);
    segment->slot = slot;
    segment->range = must(AddressRange::reserve(driver_, size));
    segment->backing = {{0, size}};
    segment->state = SegmentState::kAsleep;
    return segment;
  }

  // With pages over all of it.
  SegmentPtr make_resident() {
    SegmentPtr segment = make();
    segment->state = SegmentState::kResident;
    PhysicalMemory memory = must(PhysicalMemory::create(driver_, segment->size(), segment->properties));
    segment->mappings.push_back(must(Mapping::map(driver_, segment->address(), memory)));
    return segment;
  }

  [[nodiscard]] Driver& driver() { return *driver_; }

 private:
  std::shared_ptr<HostDriver> driver_;
  std::uint64_t last_id_ = 0;
};

std::vector<std::uint64_t> ids_of(const std::vector<SegmentPtr>& segments) {
  std::vector<std::uint64_t> ids;
  for (const SegmentPtr& segment : segments) ids.push_back(segment->id.value);
  std::sort(ids.begin(), ids.end());
  return ids;
}

// The segment that the caller must destroy, if any.
SegmentPtr freed(SegmentTable& table, const SegmentPtr& segment) { return must(table.drop_owner(segment->address())); }

}  // namespace

// --- finding ---

TEST_CASE("a_segment_is_found_at_each_of_its_addresses_and_at_no_other") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr segment = maker.make(3 * kGranule);
  const std::uint64_t begin = segment->address().value;
  CHECK_FALSE(table.find(segment->address()).has_value());
  table.insert(segment);
  for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{1}, kGranule, 3 * kGranule - 1}) {
    CHECK(table.find(DeviceAddress(begin + offset))->id == segment->id);
  }
  for (const std::uint64_t address :
       {begin - 1, begin + 3 * kGranule, std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max()}) {
    CHECK_FALSE(table.find(DeviceAddress(address)).has_value());
  }
  CHECK(table.check_valid().empty());
}

TEST_CASE("what_is_found_says_what_the_segment_is") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr segment = maker.make_resident();
  segment->properties = {kSecond, true, false};
  table.insert(segment);
  SegmentInfo info = *table.find(segment->address());
  CHECK(info.id == segment->id);
  CHECK(info.slot == kSlot);
  CHECK(info.address == segment->address());
  CHECK(info.size == kGranule);
  CHECK(info.device == kSecond);
  CHECK(info.shareable);
  CHECK(info.state == SegmentState::kResident);
  CHECK(info.live_bytes == kGranule);
  CHECK(info.mapped_bytes() == kGranule);
  CHECK(info.owned);
  CHECK_FALSE(info.captured);
  table.set_state(segment, SegmentState::kLost);
  CHECK(table.state(segment) == SegmentState::kLost);
  info = *table.find(segment->address());
  CHECK(info.state == SegmentState::kLost);
  CHECK(info.mapped_bytes() == 0);
}

TEST_CASE("a_segments_mapped_bytes_are_those_of_its_backing") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr segment = maker.make(4 * kGranule);
  table.insert(segment);
  CHECK(table.find(segment->address())->backing_bytes == 4 * kGranule);
  table.set_backing(segment, {{0, kGranule}, {2 * kGranule, kGranule}});
  table.set_state(segment, SegmentState::kMoving);
  CHECK(table.find(segment->address())->backing_bytes == 2 * kGranule);
  CHECK(table.find(segment->address())->mapped_bytes() == 2 * kGranule);
  CHECK(table.find(segment->address())->size == 4 * kGranule);
  CHECK(segment->has_pages({0, kGranule}));
  CHECK(segment->has_pages({2 * kGranule + 1, kGranule - 1}));
  CHECK(segment->has_pages({kGranule, 0}));
  CHECK_FALSE(segment->has_pages({0, kGranule + 1}));
  CHECK_FALSE(segment->has_pages({kGranule, 1}));
  CHECK_FALSE(segment->has_pages({2 * kGranule + 1, kGranule}));
  CHECK_FALSE(segment->has_pages({1, std::numeric_limits<std::uint64_t>::max()}));
}

TEST_CASE("segments_are_listed_by_address_and_by_slot") {
  Maker maker;
  SegmentTable table;
  std::vector<SegmentPtr> segments;
  for (int i = 0; i < 4; ++i) segments.push_back(maker.make(kGranule, SlotId(i % 2 == 0 ? 1 : 2)));
  for (const SegmentPtr& segment : segments) table.insert(segment);
  CHECK(table.list(SlotId(1)).size() == 2);
  CHECK(table.list(SlotId(2)).size() == 2);
  CHECK(table.list(SlotId(3)).empty());
  const std::vector<SegmentInfo> all = table.list(std::nullopt);
  REQUIRE(all.size() == 4);
  for (std::size_t i = 1; i < all.size(); ++i) CHECK(all[i - 1].address < all[i].address);
}

// --- live bytes ---

TEST_CASE("an_owned_segment_is_live_as_a_whole_and_a_freed_one_where_its_blocks_are") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr segment = maker.make(2 * kGranule);
  table.insert(segment);
  REQUIRE_OK(table.add_block(segment->address(), 0, 100));
  REQUIRE_OK(table.add_block(segment->address(), kGranule, 600));
  CHECK(table.live_extents({segment->id}) == std::vector<Extent>{{segment->id, 0, 2 * kGranule}});
  CHECK(freed(table, segment) == nullptr);
  CHECK(table.live_extents({segment->id}) == std::vector<Extent>{{segment->id, 0, kGranule + 1024}});  // a small hole
  CHECK(table.find(segment->address())->live_bytes == 512 + 1024);                                     // holes left out
  CHECK(table.live_extents({SegmentId(999)}).empty());
}

TEST_CASE("live_extents_come_in_the_order_of_the_ids") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr a = maker.make();
  const SegmentPtr b = maker.make();
  table.insert(a);
  table.insert(b);
  const std::vector<Extent> extents = table.live_extents({b->id, a->id});
  CHECK(extents == std::vector<Extent>{{b->id, 0, kGranule}, {a->id, 0, kGranule}});
}

// --- owners and blocks ---

TEST_CASE("the_owners_end_hands_a_segment_without_blocks_to_the_caller") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr segment = maker.make();
  table.insert(segment);
  CHECK(freed(table, segment) == segment);
  CHECK_FALSE(table.find(segment->address()).has_value());
  CHECK(table.list(std::nullopt).empty());
  CHECK_CODE(kNotFound, table.drop_owner(segment->address()));
  CHECK(table.take_dead().empty());
}

TEST_CASE("only_the_begin_of_an_owned_segment_can_be_freed") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr segment = maker.make();
  table.insert(segment);
  CHECK_CODE(kNotFound, table.drop_owner(segment->address() + 512));
  CHECK_CODE(kNotFound, table.drop_owner(DeviceAddress(0)));
  REQUIRE_OK(table.add_block(segment->address(), 0, 1));
  CHECK(freed(table, segment) == nullptr);
  CHECK_CODE(kNotFound, table.drop_owner(segment->address()));  // it is there, but nobody's
  CHECK(table.find(segment->address()).has_value());
}

TEST_CASE("the_last_of_a_freed_segments_blocks_buries_it") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr segment = maker.make();
  table.insert(segment);
  for (int i = 0; i < 3; ++i) REQUIRE_OK(table.add_block(segment->address(), 512, i < 2 ? 100 : 200));
  CHECK(freed(table, segment) == nullptr);
  table.drop_block(segment, 512, 100);
  table.drop_block(segment, 512, 200);
  CHECK(table.find(segment->address())->live_bytes == 512);
  CHECK(table.take_dead().empty());
  table.drop_block(segment, 512, 100);
  CHECK_FALSE(table.find(segment->address()).has_value());
  CHECK(table.take_dead() == std::vector<SegmentPtr>{segment});
  CHECK(table.take_dead().empty());
}

TEST_CASE("a_block_that_is_not_there_cannot_be_dropped") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr segment = maker.make();
  table.insert(segment);
  REQUIRE_OK(table.add_block(segment->address(), 512, 100));
  CHECK(freed(table, segment) == nullptr);
  table.drop_block(segment, 512, 99);
  table.drop_block(segment, 0, 100);
  CHECK(table.find(segment->address()).has_value());
}

TEST_CASE("blocks_of_an_owned_segment_come_and_go_without_an_end") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr segment = maker.make();
  table.insert(segment);
  REQUIRE_OK(table.add_block(segment->address(), 0, 1));
  table.drop_block(segment, 0, 1);
  CHECK(table.find(segment->address()).has_value());
  CHECK(table.take_dead().empty());
}

TEST_CASE("a_block_lies_in_its_segment") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr segment = maker.make();
  table.insert(segment);
  const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  const auto add = [&](std::uint64_t offset, std::uint64_t length) {
    return table.add_block(segment->address(), offset, length);
  };
  CHECK_CODE(kInvalidValue, add(0, 0));
  CHECK_CODE(kInvalidValue, add(0, kGranule + 1));
  CHECK_CODE(kInvalidValue, add(kGranule, 1));
  CHECK_CODE(kInvalidValue, add(1, most));
  CHECK_CODE(kInvalidValue, add(most, 2));
  CHECK(segment->blocks.empty());
  CHECK_OK(add(0, kGranule));
  CHECK_OK(add(kGranule - 1, 1));
  CHECK_CODE(kNotFound, table.add_block(segment->address() + 1, 0, 1));
  CHECK(table.check_valid().empty());
}

// --- claims ---

TEST_CASE("a_claimed_segment_outlives_its_owner_until_the_last_claim_ends") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr segment = maker.make();
  table.insert(segment);
  CHECK(table.claim({segment->id, SegmentId(999)}) == std::vector<SegmentPtr>{segment});
  CHECK(table.claim({segment->id}).size() == 1);
  CHECK(freed(table, segment) == nullptr);
  CHECK(table.list(std::nullopt).empty());  // nobody needs it any more
  CHECK(table.claimed({segment->id}).size() == 1);
  CHECK(table.claim({segment->id}).empty());  // and nobody new may hold it
  CHECK_CODE(kNotFound, table.add_block(segment->address(), 0, 1));
  CHECK(table.check_valid().empty());
  table.unclaim({segment->id});
  CHECK(table.take_dead().empty());
  table.unclaim({segment->id});
  CHECK(table.take_dead() == std::vector<SegmentPtr>{segment});
  CHECK(table.claimed({segment->id}).empty());
  table.unclaim({segment->id});
}

TEST_CASE("a_claimed_segments_last_block_does_not_bury_it") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr segment = maker.make();
  table.insert(segment);
  REQUIRE_OK(table.add_block(segment->address(), 0, 1));
  REQUIRE(table.claim({segment->id}).size() == 1);
  CHECK(freed(table, segment) == nullptr);
  table.drop_block(segment, 0, 1);
  CHECK(table.take_dead().empty());
  table.unclaim({segment->id});
  CHECK(table.take_dead().size() == 1);
}

TEST_CASE("claimed_gives_only_what_is_claimed") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr a = maker.make();
  const SegmentPtr b = maker.make();
  table.insert(a);
  table.insert(b);
  REQUIRE(table.claim({b->id}).size() == 1);
  CHECK(table.claimed({a->id, b->id, SegmentId(999)}) == std::vector<SegmentPtr>{b});
  table.unclaim({a->id});  // was not claimed
  CHECK(table.claimed({b->id}).size() == 1);
}

// --- the dead ---

TEST_CASE("dead_bytes_are_the_bytes_that_a_reap_would_give_back") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr resident = maker.make_resident();
  const SegmentPtr lost = maker.make_resident();
  const SegmentPtr asleep = maker.make();
  lost->state = SegmentState::kLost;
  for (const SegmentPtr& segment : {resident, lost, asleep}) {
    segment->owned = false;
    table.put_dead(segment);
  }
  CHECK(table.dead_bytes() == 2 * kGranule);
  REQUIRE_OK(resident->mappings.front().close());
  CHECK(table.dead_bytes() == kGranule);
  CHECK(table.check_valid().empty());
  CHECK(table.take_dead().size() == 3);
  CHECK(table.dead_bytes() == 0);
}

TEST_CASE("take_all_leaves_an_empty_table") {
  Maker maker;
  SegmentTable table;
  const SegmentPtr living = maker.make();
  const SegmentPtr dead = maker.make();
  table.insert(living);
  dead->owned = false;
  table.put_dead(dead);
  CHECK(ids_of(table.take_all()) == std::vector<std::uint64_t>{1, 2});
  CHECK_FALSE(table.find(living->address()).has_value());
  CHECK(table.take_dead().empty());
  CHECK(table.check_valid().empty());
}

// --- check_valid ---

TEST_CASE("check_valid_names_the_law_that_does_not_hold") {
  Maker maker;
  const auto law_after = [&](const SegmentPtr& segment, auto spoil) {
    SegmentTable table;
    table.insert(segment);
    CHECK(table.check_valid().empty());
    spoil(*segment, table);
    return table.check_valid();
  };
  const auto says = [](const std::string& law, const char* words) { return law.find(words) != std::string::npos; };
  using State = SegmentState;
  CHECK(says(law_after(maker.make(), [](Segment& s, SegmentTable&) { s.state = State::kResident; }), "not mapped"));
  CHECK(says(law_after(maker.make(), [](Segment& s, SegmentTable&) { s.state = State::kMoving; }), "not mapped"));
  CHECK(says(law_after(maker.make_resident(), [](Segment& s, SegmentTable&) { s.state = State::kAsleep; }), "mapped"));
  CHECK(says(law_after(maker.make(), [](Segment& s, SegmentTable&) { s.owned = false; }), "dead"));
  CHECK(says(law_after(maker.make(), [](Segment& s, SegmentTable&) { s.blocks.emplace(kGranule, 1); }), "block"));
  CHECK(says(law_after(maker.make(), [](Segment& s, SegmentTable&) { s.id = SegmentId(999); }), "id"));
  CHECK(says(law_after(maker.make(), [&](Segment&, SegmentTable& t) { t.put_dead(maker.make()); }), "dead list"));
  CHECK(says(law_after(maker.make(),
                       [&](Segment& s, SegmentTable& t) {
                         const SegmentPtr inside = maker.make();
                         const SegmentPtr around = maker.make(4 * kGranule);
                         inside->range = AddressRange();  // at address 0, like the next one
                         around->range = AddressRange();
                         t.insert(inside);
                         t.insert(around);
                         static_cast<void>(s);
                       }),
             "differ in size"));
}

// --- random use ---

namespace {

// What a table holds, in the plainest words.
struct Model {
  struct Held {
    SegmentPtr segment;
    bool owned = true;
    int claims = 0;
    std::vector<Run> blocks;
    [[nodiscard]] bool dead() const { return !owned && blocks.empty(); }
  };
  std::map<std::uint64_t, Held> held;  // by id
  std::vector<std::uint64_t> dead;     // ids, sorted

  void bury(std::uint64_t id) {
    const auto it = held.find(id);
    if (!it->second.dead() || it->second.claims > 0) return;
    dead.push_back(id);
    held.erase(it);
  }
};

class RandomUse {
 public:
  explicit RandomUse(unsigned seed) : random_(seed) {}

  void step() {
    const auto choice = below(10);
    if (model_.held.empty() || choice == 0) return insert();
    const auto it = std::next(model_.held.begin(), static_cast<std::ptrdiff_t>(below(model_.held.size())));
    if (choice == 1) return free(it->first, it->second);
    if (choice <= 4) return add(it->second);
    if (choice <= 7) return drop(it->first, it->second);
    if (choice == 8) return claim(it->first, it->second);
    unclaim(it->first, it->second);
  }

  void check() {
    REQUIRE(table_.check_valid() == "");
    std::size_t listed = 0;
    for (const auto& [id, held] : model_.held) {
      listed += held.dead() ? 0 : 1;
      const auto info = table_.find(held.segment->address());
      REQUIRE(info.has_value());
      REQUIRE(info->id.value == id);
      REQUIRE(table_.claimed({SegmentId(id)}).size() == (held.claims > 0 ? 1 : 0));
      const auto runs =
          live_runs(held.owned ? std::vector<Run>{{0, held.segment->size()}} : held.blocks, held.segment->size());
      REQUIRE(table_.live_extents({SegmentId(id)}).size() == runs.size());
    }
    REQUIRE(table_.list(std::nullopt).size() == listed);
    if (below(20) == 0) {
      std::sort(model_.dead.begin(), model_.dead.end());
      REQUIRE(ids_of(table_.take_dead()) == model_.dead);
      model_.dead.clear();
    }
  }

 private:
  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }

  void insert() {
    if (model_.held.size() >= 12) return;
    const SegmentPtr segment = maker_.make((1 + below(4)) * kGranule, SlotId(below(3)));
    table_.insert(segment);
    model_.held[segment->id.value].segment = segment;
  }

  void free(std::uint64_t id, Model::Held& held) {
    const auto result = table_.drop_owner(held.segment->address());
    REQUIRE(result.ok() == held.owned);
    if (!held.owned) return;
    held.owned = false;
    const bool at_once = held.dead() && held.claims == 0;
    REQUIRE((result.value() != nullptr) == at_once);
    if (at_once) model_.held.erase(id);
  }

  void add(Model::Held& held) {
    const Run run{below(held.segment->size()), 1 + below(4)};
    const bool fits = run.offset + run.length <= held.segment->size();
    REQUIRE(table_.add_block(held.segment->address(), run.offset, run.length).ok() == (fits && !held.dead()));
    if (fits && !held.dead()) held.blocks.push_back(run);
  }

  void drop(std::uint64_t id, Model::Held& held) {
    if (held.blocks.empty()) return;
    const Run run = held.blocks[below(held.blocks.size())];
    held.blocks.erase(std::find(held.blocks.begin(), held.blocks.end(), run));
    table_.drop_block(held.segment, run.offset, run.length);
    model_.bury(id);
  }

  void claim(std::uint64_t id, Model::Held& held) {
    REQUIRE(table_.claim({SegmentId(id)}).size() == (held.dead() ? 0 : 1));
    held.claims += held.dead() ? 0 : 1;
  }

  void unclaim(std::uint64_t id, Model::Held& held) {
    table_.unclaim({SegmentId(id)});
    if (held.claims == 0) return;
    --held.claims;
    model_.bury(id);
  }

  std::mt19937_64 random_;
  Maker maker_;
  SegmentTable table_;
  Model model_;
};

}  // namespace

TEST_CASE("a_table_in_random_use_agrees_with_a_plain_model") {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    RandomUse use(seed);
    for (int step = 0; step < 400; ++step) {
      CAPTURE(step);
      use.step();
      use.check();
    }
  }
}

TEST_CASE("threads_share_a_table") {
  Maker maker;
  SegmentTable table;
  std::vector<SegmentPtr> segments;
  for (int i = 0; i < 4; ++i) {
    segments.push_back(maker.make());
    table.insert(segments.back());
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 300; ++i) {
        const SegmentPtr& segment = segments[static_cast<std::size_t>(t + i) % segments.size()];
        const bool added = table.add_block(segment->address(), 0, 8).ok();
        const bool claimed = !table.claim({segment->id}).empty();
        static_cast<void>(table.list(kSlot));
        static_cast<void>(table.check_valid());
        if (claimed) table.unclaim({segment->id});
        if (added) table.drop_block(segment, 0, 8);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const SegmentPtr& segment : segments) {
    CHECK(segment->blocks.empty());
    CHECK(segment->claims == 0);
  }
  CHECK(table.check_valid().empty());
}

}  // namespace cumem::testing
