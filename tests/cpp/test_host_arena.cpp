// The host memory of backups: slabs, blocks, budget, pinning. Under random use, against a plain model.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver/faulty_driver.h"
#include "driver/host_driver.h"
#include "driver_helpers.h"
#include "host_arena.h"

namespace cumem::testing {
namespace {

using Sizes = std::vector<std::uint64_t>;
using Blocks = std::vector<HostBlockPtr>;
using Names = std::vector<std::string>;

std::uint64_t page() { return static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)); }

struct Setup {
  explicit Setup(std::optional<std::uint64_t> budget = std::nullopt, bool refuse_pinning = false) {
    HostDriverOptions options;
    options.device_bytes = 2 * kMiB;
    options.refuse_pinning = refuse_pinning;
    driver = std::make_shared<FaultyDriver>(must(HostDriver::create(options)));
    arena = std::make_shared<HostArena>(driver, budget);
  }
  ~Setup() {
    if (arena != nullptr) CHECK(arena->check_valid() == "");
  }
  Setup(const Setup&) = delete;

  Blocks allocate(const Sizes& sizes) const { return must(arena->allocate(sizes)); }
  [[nodiscard]] std::uint64_t registrations() const { return driver->counts().registrations; }

  std::shared_ptr<FaultyDriver> driver;
  std::shared_ptr<HostArena> arena;
};

void write_all(const HostBlock& block, int byte) { std::memset(block.data(), byte, block.size()); }

bool holds(const HostBlock& block, int byte) {
  return std::all_of(block.data(), block.data() + block.size(), [byte](std::byte b) { return b == std::byte(byte); });
}

}  // namespace

// --- blocks ---

TEST_CASE("blocks_are_apart_aligned_writable_and_in_the_order_of_their_sizes") {
  const Setup setup;
  const Blocks blocks = setup.allocate({1, 512, 513, 100000});
  REQUIRE(blocks.size() == 4);
  const Sizes rounded{512, 512, 1024, 100352};
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    CHECK(blocks[i]->size() == rounded[i]);
    CHECK(reinterpret_cast<std::uintptr_t>(blocks[i]->data()) % kBlockAlignment == 0);
    write_all(*blocks[i], static_cast<int>(i + 1));
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) CHECK(holds(*blocks[i], static_cast<int>(i + 1)));
  CHECK(setup.arena->used_bytes() == 512 + 512 + 1024 + 100352);
  CHECK(setup.arena->bytes() >= setup.arena->used_bytes());
  CHECK(setup.arena->bytes() < setup.arena->used_bytes() + page());
}

TEST_CASE("nothing_asked_for_takes_nothing") {
  const Setup setup;
  CHECK(setup.allocate({}).empty());
  CHECK(setup.arena->bytes() == 0);
}

TEST_CASE("a_freed_block_is_used_again_without_a_new_slab") {
  const Setup setup;
  Blocks blocks = setup.allocate({4096, 4096, 4096, 4096});
  const std::uint64_t bytes = setup.arena->bytes();
  const std::byte* const middle = blocks[1]->data();
  blocks[1].reset();
  blocks[2].reset();
  CHECK(setup.arena->used_bytes() == 2 * 4096);
  const Blocks again = setup.allocate({8192});  // the two runs became one
  CHECK(again[0]->data() == middle);
  CHECK(setup.arena->bytes() == bytes);
}

TEST_CASE("runs_given_back_in_any_order_become_one") {
  for (const auto& order :
       std::vector<std::vector<std::size_t>>{{0, 1, 2, 3}, {3, 2, 1, 0}, {0, 2, 1, 3}, {1, 3, 0, 2}}) {
    const Setup setup;
    Blocks blocks = setup.allocate({512, 1024, 2048, 512});
    const std::byte* const first = blocks[0]->data();
    for (const std::size_t i : order) {
      blocks[i].reset();
      CHECK(setup.arena->check_valid() == "");
    }
    CHECK(setup.arena->used_bytes() == 0);
    CHECK(setup.allocate({4096})[0]->data() == first);
  }
}

// --- slabs ---

TEST_CASE("a_slab_is_registered_once_and_covers_its_blocks") {
  const Setup setup;
  const Blocks blocks = setup.allocate({512, 512, 100000});
  CHECK(setup.driver->calls() == Names{"register_host"});
  CHECK(setup.arena->pageable_bytes() == 0);
  CHECK_REFUSED(setup.driver->register_host(blocks[0]->data(), page()));  // it is
  CHECK_REFUSED(setup.driver->register_host(blocks[2]->data() + blocks[2]->size() - page(), page()));
}

TEST_CASE("large_requests_are_spread_over_several_slabs_and_no_block_crosses_one") {
  const Setup setup;
  const Blocks blocks = setup.allocate({40 * kMiB, 40 * kMiB, 512});
  CHECK(setup.registrations() == 2);
  CHECK(setup.arena->used_bytes() == 80 * kMiB + 512);
  for (const HostBlockPtr& block : blocks) {  // populated: nothing is read from disk or faults later
    block->data()[0] = std::byte{1};
    block->data()[block->size() - 1] = std::byte{2};
  }
}

TEST_CASE("trim_gives_back_slabs_without_a_block_and_no_others") {
  const Setup setup;
  const Blocks kept = setup.allocate({page()});
  Blocks gone = setup.allocate({2 * page()});
  write_all(*kept[0], 7);
  CHECK(setup.arena->trim() == 0);
  gone.clear();
  CHECK(setup.arena->trim() == 2 * page());
  CHECK(setup.arena->bytes() == page());
  CHECK(setup.registrations() == 1);
  CHECK(holds(*kept[0], 7));
  CHECK(setup.arena->trim() == 0);
}

TEST_CASE("a_block_outlives_the_arenas_owner") {
  Setup setup;
  Blocks blocks = setup.allocate({4096});
  setup.arena.reset();
  write_all(*blocks[0], 9);
  CHECK(holds(*blocks[0], 9));
  CHECK(setup.registrations() == 1);
  blocks.clear();
  CHECK(setup.registrations() == 0);
}

TEST_CASE("an_arena_that_ends_gives_everything_back") {
  Setup setup;
  setup.allocate({4096, 100});
  CHECK(setup.registrations() == 1);
  setup.arena.reset();
  CHECK(setup.registrations() == 0);
}

// --- budget ---

TEST_CASE("a_budget_is_reached_to_the_page_and_not_passed") {
  const Setup setup(4 * page());
  const Blocks blocks = setup.allocate({3 * page()});
  const Status status = setup.arena->allocate({page() + 1}).status();
  CHECK_CODE(kOutOfHostMemory, status);
  CHECK(status.needed_bytes() == 2 * page());
  CHECK(status.free_bytes() == page());
  CHECK(status.message().find("budget") != std::string::npos);
  CHECK(setup.arena->bytes() == 3 * page());
  CHECK_OK(setup.arena->allocate({page()}));
}

TEST_CASE("a_refused_request_leaves_the_blocks_as_they_were") {
  const Setup setup(2 * page());
  Blocks blocks = setup.allocate({512, 512});
  blocks[0].reset();
  CHECK_CODE(kOutOfHostMemory, setup.arena->allocate({512, 64 * page()}));  // the first of them had room
  CHECK(setup.arena->used_bytes() == 512);
  CHECK_OK(setup.arena->allocate({512}));
}

TEST_CASE("the_same_requests_again_find_the_same_places") {
  const Setup setup;
  for (int round = 0; round < 4; ++round) {
    const Blocks first = setup.allocate({page(), 3 * page()});
    const Blocks second = setup.allocate({2 * page()});
    const Blocks third = setup.allocate({5 * page(), page()});
    CHECK(setup.arena->bytes() == 12 * page());
  }
}

TEST_CASE("empty_slabs_make_room_for_a_request_of_another_shape") {
  const Setup setup(4 * page());
  setup.allocate({page()});
  setup.allocate({2 * page()});
  CHECK(setup.arena->bytes() == 3 * page());
  const Blocks large = setup.allocate({4 * page()});
  CHECK(setup.arena->bytes() == 4 * page());
}

TEST_CASE("a_budget_of_nothing_allows_nothing") {
  const Setup setup(0);
  CHECK_CODE(kOutOfHostMemory, setup.arena->allocate({1}));
  CHECK(setup.allocate({}).empty());
}

TEST_CASE("more_than_the_machine_has_is_refused_with_numbers_and_nothing_is_kept") {
  for (const auto budget : {std::optional<std::uint64_t>(), std::optional<std::uint64_t>(1ull << 60)}) {
    const Setup setup(budget);
    const Blocks blocks = setup.allocate({512});
    const std::uint64_t bytes = setup.arena->bytes();
    const Status status = setup.arena->allocate({1ull << 50}).status();
    CHECK_CODE(kOutOfHostMemory, status);
    CHECK(status.needed_bytes() == 1ull << 50);
    CHECK(status.free_bytes() < status.needed_bytes());
    CHECK(setup.arena->bytes() == bytes);
  }
}

TEST_CASE("sizes_that_no_block_can_have_are_refused") {
  const Setup setup;
  const Blocks blocks = setup.allocate({512});
  const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  CHECK_CODE(kInvalidValue, setup.arena->allocate({512, 0}));
  CHECK_CODE(kInvalidValue, setup.arena->allocate({most}));                    // rounds to nothing
  CHECK_CODE(kInvalidValue, setup.arena->allocate({1ull << 63, 1ull << 63}));  // adds up to nothing
  CHECK(setup.arena->used_bytes() == 512);
}

// --- pinning ---

TEST_CASE("slabs_whose_pinning_is_refused_stay_and_are_counted_as_pageable") {
  const Setup setup(std::nullopt, true);
  const Blocks blocks = setup.allocate({4096});
  write_all(*blocks[0], 3);
  CHECK(holds(*blocks[0], 3));
  CHECK(setup.arena->pageable_bytes() == setup.arena->bytes());
  CHECK(setup.registrations() == 0);
}

TEST_CASE("a_broken_context_fails_the_request_and_keeps_nothing") {
  const Setup setup;
  REQUIRE_OK(setup.driver->fail_at(0, Code::kContextBroken));
  CHECK_CODE(kContextBroken, setup.arena->allocate({4096}));
  CHECK(setup.arena->bytes() == 0);
  setup.driver->clear();
  CHECK_OK(setup.arena->allocate({4096}));
}

TEST_CASE("memory_that_the_driver_does_not_let_go_of_stays_for_the_next_trim") {
  const Setup setup;
  Blocks blocks = setup.allocate({page()});
  std::byte* const data = blocks[0]->data();
  blocks.clear();
  REQUIRE_OK(setup.driver->fail_at(0, Code::kDriver, 2));
  Status failed;
  CHECK(setup.arena->trim(&failed) == 0);
  CHECK_CODE(kDriver, failed);
  CHECK(setup.arena->trim() == 0);
  CHECK(setup.arena->bytes() == page());
  CHECK(setup.allocate({page()})[0]->data() == data);  // as good as before
  data[0] = std::byte{5};
  CHECK(setup.arena->trim() == page());
  CHECK(setup.registrations() == 0);
}

TEST_CASE("memory_that_the_driver_does_not_let_go_of_at_the_end_is_leaked_and_not_unmapped") {
  Setup setup;
  Blocks blocks = setup.allocate({page()});
  std::byte* const data = blocks[0]->data();
  setup.arena.reset();
  REQUIRE_OK(setup.driver->fail_at(0, Code::kDriver));
  blocks.clear();
  CHECK(setup.registrations() == 1);
  data[0] = std::byte{5};
}

// --- threads, forks, random use ---

TEST_CASE("threads_share_an_arena_within_its_budget") {
  const Setup setup(64 * page());
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  for (int t = 1; t <= 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));  // NOLINT: the same sequence every time
      for (int i = 0; i < 60; ++i) {
        auto blocks = setup.arena->allocate({1 + random() % 20000, 1 + random() % 2000});
        if (!blocks.ok()) {
          bad += code_of(blocks) == Code::kOutOfHostMemory ? 0 : 1;
          continue;
        }
        for (const HostBlockPtr& block : blocks.value()) write_all(*block, t);
        for (const HostBlockPtr& block : blocks.value()) bad += holds(*block, t) ? 0 : 1;
        bad += setup.arena->bytes() <= 64 * page() ? 0 : 1;
        if (i % 8 == 0) setup.arena->trim();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(bad.load() == 0);
  CHECK(setup.arena->used_bytes() == 0);
  setup.arena->trim();
  CHECK(setup.arena->bytes() == 0);
  CHECK(setup.registrations() == 0);
}

TEST_CASE("a_forked_child_may_drop_its_copies_of_blocks_and_arena") {
  Setup setup;
  Blocks blocks = setup.allocate({4096});
  write_all(*blocks[0], 4);
  std::cout.flush();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    blocks.clear();
    setup.arena.reset();
    _exit(setup.driver->calls() == Names{"register_host"} ? 0 : 1);  // no call to the parent's driver
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(holds(*blocks[0], 4));
}

TEST_CASE("an_arena_in_random_use_never_gives_a_byte_twice") {
  for (unsigned seed = 1; seed <= 5; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);  // NOLINT: the same sequence every time
    const Setup setup(200 * page());
    std::vector<std::pair<HostBlockPtr, int>> held;
    std::uint64_t used = 0;
    for (int step = 0; step < 300; ++step) {
      if (random() % 2 == 0 && !held.empty()) {
        const auto it = held.begin() + static_cast<std::ptrdiff_t>(random() % held.size());
        REQUIRE(holds(*it->first, it->second));
        used -= it->first->size();
        held.erase(it);
      } else {
        auto made = setup.arena->allocate({1 + random() % 30000, 1 + random() % 600});
        if (!made.ok()) continue;
        for (HostBlockPtr& block : made.value()) {
          used += block->size();
          held.emplace_back(std::move(block), step % 251);
          write_all(*held.back().first, step % 251);
        }
      }
      if (random() % 10 == 0) setup.arena->trim();
      REQUIRE(setup.arena->check_valid() == "");
      REQUIRE(setup.arena->used_bytes() == used);
      REQUIRE(setup.arena->bytes() <= 200 * page());
    }
  }
}

}  // namespace cumem::testing
