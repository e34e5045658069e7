// Extent: a run of live bytes of one segment. Copies, fills, backups and views are all lists of extents.
#pragma once

#include <cstdint>
#include <tuple>

#include "types.h"

namespace cumem {

struct Extent {
  SegmentId segment;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;

  friend bool operator==(const Extent& a, const Extent& b) { return a.key() == b.key(); }
  friend bool operator<(const Extent& a, const Extent& b) { return a.key() < b.key(); }
  [[nodiscard]] std::uint64_t end() const { return offset + length; }

 private:
  [[nodiscard]] std::tuple<std::uint64_t, std::uint64_t, std::uint64_t> key() const {
    return {segment.value, offset, length};
  }
};

}  // namespace cumem
