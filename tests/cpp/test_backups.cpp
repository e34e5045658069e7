// Which host memory holds which extent.
#include <unistd.h>

#include <limits>
#include <memory>
#include <vector>

#include "backups.h"
#include "driver/host_driver.h"
#include "driver_helpers.h"

namespace cumem::testing {
namespace {

constexpr SegmentId kOne{1};
constexpr SegmentId kTwo{2};
using Extents = std::vector<Extent>;

struct Setup {
  explicit Setup(std::uint64_t budget = kMiB) : arena(std::make_shared<HostArena>(driver(), budget)), backups(arena) {}
  static std::shared_ptr<HostDriver> driver() {
    HostDriverOptions options;
    options.device_bytes = 2 * kMiB;
    return must(HostDriver::create(options));
  }
  std::shared_ptr<HostArena> arena;
  Backups backups;
};

}  // namespace

TEST_CASE("an_extent_is_reserved_once_and_keeps_its_block") {
  Setup setup;
  CHECK_OK(setup.backups.reserve({{kOne, 0, 1000}}));
  const auto before = must(setup.backups.blocks({{kOne, 0, 1000}}));
  CHECK_OK(setup.backups.reserve({{kOne, 0, 1000}, {kOne, 1024, 24}}));
  CHECK(must(setup.backups.blocks({{kOne, 0, 1000}})) == before);
  CHECK(setup.arena->used_bytes() == 1024 + 512);
  CHECK(setup.backups.bytes(kOne) == 1024);
  CHECK(setup.backups.bytes(kTwo) == 0);
}

TEST_CASE("what_is_reserved_needs_no_room_again") {
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  Setup setup(page);
  CHECK_OK(setup.backups.reserve({{kOne, 0, page}}));
  CHECK_OK(setup.backups.reserve({{kOne, 0, page}}));
}

TEST_CASE("one_call_may_name_an_extent_twice") {
  Setup setup;
  CHECK_OK(setup.backups.reserve({{kOne, 0, 512}, {kOne, 0, 512}}));
  CHECK(setup.arena->used_bytes() == 512);
}

TEST_CASE("blocks_come_in_the_order_asked_for") {
  Setup setup;
  CHECK_OK(setup.backups.reserve({{kOne, 0, 512}, {kTwo, 0, 1024}}));
  const auto blocks = must(setup.backups.blocks({{kTwo, 0, 1024}, {kOne, 0, 512}}));
  CHECK(blocks[0]->size() == 1024);
  CHECK(blocks[1]->size() == 512);
  CHECK_CODE(kNotFound, setup.backups.blocks({{kOne, 0, 512}, {kTwo, 0, 512}}));
}

TEST_CASE("a_reserve_that_does_not_fit_reserves_nothing") {
  Setup setup(4096);
  CHECK_CODE(kOutOfHostMemory, setup.backups.reserve({{kOne, 0, 512}, {kOne, 512, kMiB}}));
  CHECK(setup.backups.bytes(kOne) == 0);
  CHECK(setup.arena->used_bytes() == 0);
}

TEST_CASE("memory_is_found_inside_one_backup_only") {
  Setup setup;
  CHECK_OK(setup.backups.reserve({{kOne, 1024, 1000}, {kOne, 4096, 512}, {kTwo, 0, 512}}));
  const HostBlockPtr block = must(setup.backups.blocks({{kOne, 1024, 1000}})).front();
  CHECK(must(setup.backups.find(kOne, 1024, 1000)).data == block->data());
  CHECK(must(setup.backups.find(kOne, 1524, 500)).data == block->data() + 500);
  CHECK(must(setup.backups.find(kOne, 1524, 500)).block == block);
  CHECK_CODE(kNotFound, setup.backups.find(kOne, 1524, 501));
  CHECK_CODE(kNotFound, setup.backups.find(kOne, 1023, 2));
  CHECK_CODE(kNotFound, setup.backups.find(kOne, 0, 1));
  CHECK_CODE(kNotFound, setup.backups.find(kOne, 3000, 8));
  CHECK_CODE(kNotFound, setup.backups.find(kOne, 1524, std::numeric_limits<std::uint64_t>::max()));
  CHECK_CODE(kNotFound, setup.backups.find(kTwo, 1024, 8));
  CHECK_CODE(kNotFound, setup.backups.find(SegmentId(3), 0, 8));
}

TEST_CASE("dropped_backups_give_their_memory_back_once_nobody_looks_at_it") {
  Setup setup;
  CHECK_OK(setup.backups.reserve({{kOne, 0, 512}, {kOne, 512, 512}, {kTwo, 0, 512}}));
  HostRange view = must(setup.backups.find(kOne, 0, 512));
  setup.backups.drop({{kOne, 0, 512}, {SegmentId(9), 0, 512}});
  CHECK(setup.backups.bytes(kOne) == 512);
  CHECK(setup.arena->used_bytes() == 3 * 512);
  view.block.reset();
  CHECK(setup.arena->used_bytes() == 2 * 512);
  setup.backups.drop_segment(kOne);
  CHECK(setup.backups.bytes(kOne) == 0);
  CHECK(setup.backups.bytes(kTwo) == 512);
  CHECK(setup.arena->used_bytes() == 512);
}

TEST_CASE("backups_of_one_segment_that_overlap_break_a_law") {
  Setup setup;
  CHECK_OK(setup.backups.reserve({{kOne, 0, 1024}, {kOne, 1024, 8}, {kTwo, 512, 8}}));
  CHECK(setup.backups.check_valid() == "");
  CHECK_OK(setup.backups.reserve({{kOne, 512, 8}}));
  CHECK(setup.backups.check_valid() != "");
}

}  // namespace cumem::testing
