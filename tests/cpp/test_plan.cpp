// Planning: runs of live bytes, slabs. Under random input, against a map of every 512-byte unit.
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "plan.h"
#include "types.h"

namespace cumem {

std::ostream& operator<<(std::ostream& out, const Run& run) {
  return out << "[" << run.offset << ", +" << run.length << ")";
}

}  // namespace cumem

namespace cumem::testing {
namespace {

using Runs = std::vector<Run>;
using Sizes = std::vector<std::uint64_t>;
using Random = std::mt19937_64;

constexpr unsigned kSeed = 20261130;

std::uint64_t below(Random& random, std::uint64_t bound) { return random() % bound; }
std::uint64_t end_of(const Run& run) { return run.offset + run.length; }
std::uint64_t sum(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0}); }
std::uint64_t aligned(std::uint64_t size) { return (size + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment; }

// Which units of kBlockAlignment bytes hold a live byte.
std::vector<bool> live_units(const Runs& blocks, std::uint64_t segment_size) {
  std::vector<bool> live((segment_size + kBlockAlignment - 1) / kBlockAlignment);
  for (const Run& block : blocks) {
    if (block.length == 0) continue;
    const std::uint64_t last = (end_of(block) - 1) / kBlockAlignment;
    for (std::uint64_t unit = block.offset / kBlockAlignment; unit <= last; ++unit) live[unit] = true;
  }
  return live;
}

// The only answer there is for hole_bytes > 0: a run goes on over every hole that is smaller.
Runs naive_runs(const Runs& blocks, std::uint64_t segment_size, std::uint64_t hole_bytes) {
  const std::vector<bool> live = live_units(blocks, segment_size);
  Runs runs;
  for (std::uint64_t unit = 0; unit < live.size(); ++unit) {
    if (!live[unit]) continue;
    const std::uint64_t begin = unit * kBlockAlignment;
    const std::uint64_t end = std::min(begin + kBlockAlignment, segment_size);
    if (!runs.empty() && begin - end_of(runs.back()) < hole_bytes) {
      runs.back().length = end - runs.back().offset;
    } else {
      runs.push_back({begin, end - begin});
    }
  }
  return runs;
}

// The law of live_runs that does not hold, "" if all do.
std::string broken_law(const Runs& runs, const Runs& blocks, std::uint64_t segment_size, std::uint64_t hole_bytes) {
  const std::vector<bool> live = live_units(blocks, segment_size);
  std::vector<bool> covered(live.size());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const std::uint64_t end = end_of(runs[i]);
    if (runs[i].length == 0 || end > segment_size) return "a run is empty or leaves the segment";
    if (runs[i].offset % kBlockAlignment != 0) return "a run does not begin at a unit";
    if (end % kBlockAlignment != 0 && end != segment_size) return "a run does not end with a unit";
    if (!live[runs[i].offset / kBlockAlignment]) return "a run does not begin at a live byte";
    if (!live[(end - 1) / kBlockAlignment]) return "a run does not end at a live byte";
    if (i > 0 && runs[i].offset < end_of(runs[i - 1]) + hole_bytes) return "two runs are too close";
    for (std::uint64_t at = runs[i].offset; at < end; at += kBlockAlignment) covered[at / kBlockAlignment] = true;
  }
  for (std::size_t unit = 0; unit < live.size(); ++unit) {
    if (live[unit] && !covered[unit]) return "a live byte is in no run";
  }
  return "";
}

Runs random_blocks(Random& random, std::uint64_t segment_size) {
  Runs blocks(below(random, 12));
  for (Run& block : blocks) {
    block.offset = below(random, segment_size);
    block.length = below(random, std::min<std::uint64_t>(segment_size - block.offset, 6000) + 1);
    if (below(random, 2) == 0) block.offset = block.offset / kBlockAlignment * kBlockAlignment;
  }
  return blocks;
}

// The law of plan_slabs that does not hold, "" if all do.
std::string broken_law(const SlabPlan& plan, const Sizes& sizes, std::uint64_t target, std::uint64_t page) {
  if (plan.places.size() != sizes.size()) return "there is not one place a block";
  std::uint64_t aligned_sum = 0;
  Sizes filled(plan.slab_bytes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto [slab, offset] = plan.places[i];
    if (slab >= plan.slab_bytes.size()) return "a block is in no slab";
    if (offset != filled[slab]) return "blocks are not side by side in their order";
    filled[slab] = offset + aligned(sizes[i]);
    if (filled[slab] > plan.slab_bytes[slab]) return "a block leaves its slab";
    if (offset > 0 && filled[slab] > target) return "a slab is filled beyond its target";
    aligned_sum += aligned(sizes[i]);
  }
  for (std::size_t slab = 0; slab < filled.size(); ++slab) {
    if (filled[slab] == 0) return "a slab holds nothing";
    if (plan.slab_bytes[slab] % page != 0) return "a slab does not end with a page";
    if (plan.slab_bytes[slab] >= filled[slab] + page) return "a slab ends with a page too much";
  }
  const bool tight = sizes.empty() || sum(plan.slab_bytes) < aligned_sum + plan.slab_bytes.size() * page;
  return tight ? "" : "the slabs are larger than allowed";
}

}  // namespace

// --- live runs ---

TEST_CASE("no_live_block_makes_no_run") {
  CHECK(live_runs({}, kMiB).empty());
  CHECK(live_runs({{0, 0}, {512, 0}}, kMiB).empty());
}

TEST_CASE("a_run_is_rounded_outwards_and_clipped_to_the_segment") {
  CHECK(live_runs({{1, 1}}, kMiB) == Runs{{0, 512}});
  CHECK(live_runs({{511, 2}}, kMiB) == Runs{{0, 1024}});
  CHECK(live_runs({{512, 512}}, kMiB) == Runs{{512, 512}});
  CHECK(live_runs({{900, 100}}, 1000) == Runs{{512, 488}});
}

TEST_CASE("a_hole_of_16_MiB_splits_a_run_and_a_smaller_one_does_not") {
  const std::uint64_t size = 64 * kMiB;
  CHECK(kHoleBytes == 16 * kMiB);
  CHECK(live_runs({{0, 512}, {512 + kHoleBytes, 512}}, size) == Runs{{0, 512}, {512 + kHoleBytes, 512}});
  CHECK(live_runs({{0, 512}, {kHoleBytes, 512}}, size) == Runs{{0, 512 + kHoleBytes}});
  CHECK(live_runs({{0, 1}, {511 + kHoleBytes, 1}}, size) == Runs{{0, 512 + kHoleBytes}});  // measured once rounded
}

TEST_CASE("blocks_may_come_in_any_order_and_overlap") {
  CHECK(live_runs({{4096, 512}, {0, 1024}, {512, 2048}, {600, 10}}, 8192, 512) == Runs{{0, 2560}, {4096, 512}});
}

TEST_CASE("runs_of_random_blocks_are_the_naive_ones") {
  Random random(kSeed);
  for (int round = 0; round < 2000; ++round) {
    const std::uint64_t size = 1 + below(random, 64 * kKiB);
    const Runs blocks = random_blocks(random, size);
    for (const std::uint64_t hole : {1, 512, 513, 4096, 30000}) {
      CAPTURE(round);
      CAPTURE(hole);
      const Runs runs = live_runs(blocks, size, hole);
      REQUIRE(runs == naive_runs(blocks, size, hole));
      REQUIRE(broken_law(runs, blocks, size, hole) == "");
    }
  }
}

TEST_CASE("runs_without_a_hole_size_add_up_to_the_live_units") {
  Random random(kSeed + 1);
  for (int round = 0; round < 2000; ++round) {
    CAPTURE(round);
    const std::uint64_t size = 512 * (1 + below(random, 128));
    const Runs blocks = random_blocks(random, size);
    const Runs runs = live_runs(blocks, size, 0);
    REQUIRE(broken_law(runs, blocks, size, 0) == "");
    const std::vector<bool> live = live_units(blocks, size);
    std::uint64_t bytes = 0;
    for (const Run& run : runs) bytes += run.length;
    REQUIRE(bytes == static_cast<std::uint64_t>(std::count(live.begin(), live.end(), true)) * kBlockAlignment);
  }
}

// --- pages ---

TEST_CASE("pages_are_those_that_a_run_touches") {
  CHECK(page_runs({{1, 1}}, 16384, 4096) == Runs{{0, 4096}});
  CHECK(page_runs({{4095, 2}}, 16384, 4096) == Runs{{0, 8192}});
  CHECK(page_runs({{4096, 4096}}, 16384, 4096) == Runs{{4096, 4096}});
  CHECK(page_runs({{0, 1}, {12288, 1}}, 16384, 4096) == Runs{{0, 4096}, {12288, 4096}});
  CHECK(page_runs({{0, 1}, {4096, 1}, {6000, 1}}, 16384, 4096) == Runs{{0, 8192}});  // neighbours become one
  CHECK(page_runs({{0, 16384}}, 16384, 4096) == Runs{{0, 16384}});
  CHECK(page_runs({}, 16384, 4096).empty());
  CHECK(page_runs({{512, 0}}, 16384, 4096).empty());
}

TEST_CASE("pages_of_random_runs_are_the_naive_ones") {
  Random random(kSeed + 3);
  for (int round = 0; round < 2000; ++round) {
    CAPTURE(round);
    const std::uint64_t page = std::uint64_t{512} << below(random, 4);
    const std::uint64_t size = page * (1 + below(random, 40));
    const Runs runs = live_runs(random_blocks(random, size), size, below(random, 2000));
    Runs expected;
    for (std::uint64_t begin = 0; begin < size; begin += page) {
      const bool touched = std::any_of(
          runs.begin(), runs.end(), [&](const Run& run) { return run.offset < begin + page && end_of(run) > begin; });
      if (!touched) continue;
      if (!expected.empty() && end_of(expected.back()) == begin) {
        expected.back().length += page;
      } else {
        expected.push_back({begin, page});
      }
    }
    REQUIRE(page_runs(runs, size, page) == expected);
  }
}

// --- slabs ---

TEST_CASE("blocks_fill_a_slab_up_to_its_target_in_order") {
  const SlabPlan plan = plan_slabs({1000, 1024, 1, 2048}, 2560, 4096);
  CHECK(plan.slab_bytes == Sizes{4096, 4096});
  CHECK(plan.places[0].offset == 0);
  CHECK(plan.places[1].offset == 1024);
  CHECK(plan.places[2].offset == 2048);  // 2560 bytes are full
  CHECK(plan.places[2].slab == 0);
  CHECK(plan.places[3].slab == 1);
}

TEST_CASE("a_block_larger_than_the_target_gets_a_slab_of_its_own") {
  const SlabPlan plan = plan_slabs({10000, 1}, 4096, 4096);
  CHECK(plan.slab_bytes == Sizes{12288, 4096});
  CHECK(plan.places[1].slab == 1);
}

TEST_CASE("no_blocks_need_no_slab") { CHECK(plan_slabs({}, kMiB, 4096).slab_bytes.empty()); }

TEST_CASE("slabs_of_random_blocks_keep_the_laws") {
  Random random(kSeed + 2);
  for (int round = 0; round < 2000; ++round) {
    CAPTURE(round);
    const std::uint64_t page = std::uint64_t{4096} << below(random, 5);
    const std::uint64_t target = 1 + below(random, 64 * page);
    Sizes sizes(below(random, 40));
    for (std::uint64_t& size : sizes) size = 1 + below(random, below(random, 4) == 0 ? 2 * target : 2000);
    REQUIRE(broken_law(plan_slabs(sizes, target, page), sizes, target, page) == "");
  }
}

TEST_CASE("the_slab_target_shares_the_bytes_between_threads_within_bounds") {
  CHECK(slab_target(8 * kGiB, 8, 512 * kMiB) == 512 * kMiB);
  CHECK(slab_target(kGiB, 8, 512 * kMiB) == 128 * kMiB);
  CHECK(slab_target(kMiB, 8, 512 * kMiB) == 64 * kMiB);
  CHECK(slab_target(kGiB, 0, 512 * kMiB) == 512 * kMiB);
  CHECK(slab_target(kGiB, 8, 16 * kMiB) == 16 * kMiB);
}

}  // namespace cumem::testing
