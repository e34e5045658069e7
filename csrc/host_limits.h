// How much more host memory this process may take, by what the system says. Read anew at every question.
#pragma once

#include <cstdint>
#include <string>

namespace cumem {

struct HostHeadroom {
  std::uint64_t free_bytes = ~0ull;
  std::string limit;  // what sets it: "MemAvailable" or a cgroup's path; empty if nothing could be read
};

// The least that the memory cgroup of this process and each of its ancestors (v2 or v1) leave, reclaimable page cache
// counted as free; with `system_too`, MemAvailable as well. `root` is the file system to read, "" for the real one.
// What cannot be read sets no limit.
[[nodiscard]] HostHeadroom host_headroom(bool system_too, const std::string& root = "");

}  // namespace cumem
