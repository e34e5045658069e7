// Byte helpers.
#include <doctest/doctest.h>

#include "types.h"

namespace cumem::testing {

TEST_CASE("round_up_gives_the_next_multiple") {
  CHECK(round_up(0, 512) == 0);
  CHECK(round_up(1, 512) == 512);
  CHECK(round_up(512, 512) == 512);
  CHECK(round_up(513, 512) == 1024);
  CHECK(round_up(7, 1) == 7);
  CHECK(round_up(10, 3) == 12);
}

TEST_CASE("round_up_gives_nothing_where_64_bits_end") {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  CHECK(round_up(kMost, 1) == kMost);
  CHECK_FALSE(round_up(kMost, 2 * kMiB).has_value());
  CHECK(round_up(kMost - 2 * kMiB + 1, 2 * kMiB) == kMost - 2 * kMiB + 1);
  CHECK_FALSE(round_up(kMost - 2 * kMiB + 2, 2 * kMiB).has_value());
}

}  // namespace cumem::testing
