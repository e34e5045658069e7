#include "host_limits.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

namespace cumem {
namespace {

// A small file's text; empty if it cannot be read.
std::string read_file(const std::string& path) {
  std::string text;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return text;
  char buffer[4096];
  for (ssize_t got = read(fd, buffer, sizeof(buffer)); got > 0; got = read(fd, buffer, sizeof(buffer))) {
    text.append(buffer, static_cast<std::size_t>(got));
  }
  close(fd);
  return text;
}

std::string_view skip_spaces(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t\n");
  return begin == std::string_view::npos ? std::string_view() : text.substr(begin);
}

// The number that the text begins with; nothing for "max" and the like.
std::optional<std::uint64_t> parse_number(std::string_view text) {
  const std::string_view digits = skip_spaces(text);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end == digits.data()) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> read_number(const std::string& path) { return parse_number(read_file(path)); }

// Takes the first line off `text`.
std::string_view next_line(std::string_view& text) {
  const auto end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

// The number behind `key` in a file of "key value" lines.
std::optional<std::uint64_t> read_key(const std::string& path, std::string_view key) {
  const std::string text = read_file(path);
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view line = next_line(rest);
    if (line.size() > key.size() && line.substr(0, key.size()) == key && line[key.size()] == ' ') {
      return parse_number(line.substr(key.size()));
    }
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
  const std::string text = read_file(root + "/proc/self/cgroup");
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string line(next_line(rest));  // "hierarchy:controllers:path"
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
