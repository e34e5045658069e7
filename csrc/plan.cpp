#include "plan.h"

#include <algorithm>

#include "types.h"

namespace cumem {
namespace {

std::uint64_t align_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

std::vector<Run> live_runs(std::vector<Run> blocks, std::uint64_t segment_size, std::uint64_t hole_bytes) {
  std::sort(blocks.begin(), blocks.end(), [](const Run& a, const Run& b) { return a.offset < b.offset; });
  std::vector<Run> runs;
  for (const Run& block : blocks) {
    if (block.length == 0) continue;
    const std::uint64_t begin = block.offset / kBlockAlignment * kBlockAlignment;
    const std::uint64_t end = std::min(align_up(block.offset + block.length, kBlockAlignment), segment_size);
    if (!runs.empty() && begin < runs.back().offset + runs.back().length + hole_bytes) {
      Run& last = runs.back();
      last.length = std::max(last.offset + last.length, end) - last.offset;
    } else {
      runs.push_back({begin, end - begin});
    }
  }
  return runs;
}

std::vector<Run> page_runs(const std::vector<Run>& runs, std::uint64_t segment_size, std::uint64_t page_bytes) {
  std::vector<Run> pages;
  for (const Run& run : runs) {
    if (run.length == 0) continue;
    const std::uint64_t begin = run.offset / page_bytes * page_bytes;
    const std::uint64_t end = std::min(align_up(run.offset + run.length, page_bytes), segment_size);
    if (!pages.empty() && begin <= pages.back().offset + pages.back().length) {
      Run& last = pages.back();
      last.length = std::max(last.offset + last.length, end) - last.offset;
    } else {
      pages.push_back({begin, end - begin});
    }
  }
  return pages;
}

SlabPlan plan_slabs(const std::vector<std::uint64_t>& sizes, std::uint64_t target_bytes, std::uint64_t page_bytes) {
  SlabPlan plan;
  plan.places.reserve(sizes.size());
  std::uint64_t filled = 0;
  for (const std::uint64_t size : sizes) {
    const std::uint64_t aligned = align_up(size, kBlockAlignment);
    const bool fits = !plan.slab_bytes.empty() && filled + aligned <= target_bytes;
    if (!fits) {
      plan.slab_bytes.push_back(0);
      filled = 0;
    }
    plan.places.push_back({plan.slab_bytes.size() - 1, filled});
    filled += aligned;
    plan.slab_bytes.back() = align_up(filled, page_bytes);
  }
  return plan;
}

std::uint64_t slab_target(std::uint64_t total_bytes, unsigned threads, std::uint64_t largest_bytes) {
  const std::uint64_t share = total_bytes / std::max(1u, threads);
  return std::clamp(share, std::min(64 * kMiB, largest_bytes), largest_bytes);
}

}  // namespace cumem
