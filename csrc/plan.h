// Pure planning: from live blocks to runs, from sizes to slabs, from extents to pieces. No driver, no lock, no state.
#pragma once

#include <cstdint>
#include <vector>

namespace cumem {

inline constexpr std::uint64_t kBlockAlignment = 512;     // bytes; torch's own rounding
inline constexpr std::uint64_t kHoleBytes = 16ull << 20;  // a hole of this size and more splits a run

struct Run {
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  friend bool operator==(const Run& a, const Run& b) { return a.offset == b.offset && a.length == b.length; }
};

// The runs that cover `blocks` (any order, may overlap) within a segment of `segment_size` bytes.
// Post: ascending, disjoint, each begins and ends at a live byte rounded outwards to kBlockAlignment (clipped to the
// segment); two neighbours are at least `hole_bytes` apart; every live byte is in exactly one run.
[[nodiscard]] std::vector<Run> live_runs(std::vector<Run> blocks, std::uint64_t segment_size,
                                         std::uint64_t hole_bytes = kHoleBytes);

// The pages of `page_bytes` that `runs` (ascending, disjoint) touch, as runs: ascending, disjoint, never adjacent,
// multiples of `page_bytes`, clipped to the segment (itself a multiple).
[[nodiscard]] std::vector<Run> page_runs(const std::vector<Run>& runs, std::uint64_t segment_size,
                                         std::uint64_t page_bytes);

// Sizes of the slabs to add for blocks of these sizes (> 0), and where each block goes.
struct SlabPlan {
  struct Place {
    std::size_t slab = 0;
    std::uint64_t offset = 0;
  };
  std::vector<std::uint64_t> slab_bytes;  // multiples of `page_bytes`
  std::vector<Place> places;              // one a block, in order; no block crosses a slab
};

// Packs blocks in order into slabs of about `target_bytes`; a block larger than that gets its own.
// Post: sum(slab_bytes) < sum(aligned sizes) + slab_bytes.size() * page_bytes.
[[nodiscard]] SlabPlan plan_slabs(const std::vector<std::uint64_t>& sizes, std::uint64_t target_bytes,
                                  std::uint64_t page_bytes);

// The slab size that lets `threads` populate `total_bytes` side by side, between 64 MiB and `largest_bytes`.
[[nodiscard]] std::uint64_t slab_target(std::uint64_t total_bytes, unsigned threads, std::uint64_t largest_bytes);

}  // namespace cumem
