#include "host_limits.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

namespace cumem {
namespace {

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // missing, or "max"
}

// The number behind `key` in a file of "key value" lines.
std::optional<std::uint64_t> read_key(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    std::uint64_t value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return std::nullopt;
}

void lower(HostHeadroom& room, std::uint64_t free_bytes, const std::string& limit) {
  if (free_bytes >= room.free_bytes) return;
  room.free_bytes = free_bytes;
  room.limit = limit;
}

struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* reclaimable;  // key in memory.stat
};

constexpr CgroupFiles kV2{"memory.max", "memory.current", "inactive_file"};
constexpr CgroupFiles kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};

void lower_by_cgroup(HostHeadroom& room, const std::string& folder, const CgroupFiles& files) {
  const auto limit = read_number(folder + "/" + files.limit);
  const auto usage = read_number(folder + "/" + files.usage);
  if (!limit || !usage) return;
  const std::uint64_t reclaimable = read_key(folder + "/memory.stat", files.reclaimable).value_or(0);
  const std::uint64_t used = *usage - std::min(*usage, reclaimable);
  lower(room, *limit - std::min(*limit, used), folder);
}

// `path` and every ancestor of it below `mount`.
void lower_by_ancestors(HostHeadroom& room, const std::string& mount, std::string path, const CgroupFiles& files) {
  while (true) {
    if (path == "/") path.clear();
    lower_by_cgroup(room, mount + path, files);
    if (path.empty()) return;
    path.erase(path.find_last_of('/'));
  }
}

void lower_by_cgroups(HostHeadroom& room, const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (path.empty() || path.front() != '/') continue;
    if (controllers == ",,") lower_by_ancestors(room, root + "/sys/fs/cgroup", path, kV2);
    if (controllers.find(",memory,") != std::string::npos) {
      lower_by_ancestors(room, root + "/sys/fs/cgroup/memory", path, kV1);
    }
  }
}

}  // namespace

HostHeadroom host_headroom(bool system_too, const std::string& root) {
  HostHeadroom room;
  lower_by_cgroups(room, root);
  if (system_too) {
    const auto kib = read_key(root + "/proc/meminfo", "MemAvailable:");
    if (kib) lower(room, *kib * 1024, "MemAvailable");
  }
  return room;
}

}  // namespace cumem
