// Headroom of host memory, read from trees of files that look like /proc and /sys/fs/cgroup.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "host_limits.h"

namespace cumem::testing {
namespace {

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

// A root directory with files to be read instead of the real ones; gone at the end.
class Tree {
 public:
  Tree() {
    std::string name = (std::filesystem::temp_directory_path() / "cumem-limits-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    root_ = name;
  }
  Tree(const Tree&) = delete;
  ~Tree() { std::filesystem::remove_all(root_); }

  Tree& add(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
    return *this;
  }

  // A version 2 group: its limit and usage, and how much of the usage is reclaimable.
  Tree& add_v2(const std::string& group, const std::string& limit, std::uint64_t usage, std::uint64_t reclaimable = 0) {
    const std::string folder = "/sys/fs/cgroup" + group;
    add(folder + "/memory.max", limit + "\n");
    add(folder + "/memory.current", std::to_string(usage) + "\n");
    return add(folder + "/memory.stat",
               "anon 5\nactive_file 77\ninactive_file " + std::to_string(reclaimable) + "\nslab 9\n");
  }

  Tree& add_v1(const std::string& group, const std::string& limit, std::uint64_t usage, std::uint64_t reclaimable = 0) {
    const std::string folder = "/sys/fs/cgroup/memory" + group;
    add(folder + "/memory.limit_in_bytes", limit + "\n");
    add(folder + "/memory.usage_in_bytes", std::to_string(usage) + "\n");
    return add(folder + "/memory.stat", "inactive_file 1\ntotal_inactive_file " + std::to_string(reclaimable) + "\n");
  }

  [[nodiscard]] HostHeadroom headroom(bool system_too = false) const { return host_headroom(system_too, root_); }
  [[nodiscard]] const std::string& root() const { return root_; }

 private:
  std::string root_;
};

constexpr const char* kMeminfo =
    "MemTotal:       32000 kB\nMemFree:         9 kB\nMemAvailable:    2000 kB\nBuffers: 7 kB\n";

}  // namespace

TEST_CASE("what_cannot_be_read_sets_no_limit") {
  const Tree tree;
  CHECK(tree.headroom(true).free_bytes == kNoLimit);
  CHECK(tree.headroom(true).limit.empty());
}

TEST_CASE("available_memory_counts_only_where_it_is_asked_for") {
  Tree tree;
  tree.add("/proc/meminfo", kMeminfo);
  CHECK(tree.headroom(true).free_bytes == 2000 * 1024);
  CHECK(tree.headroom(true).limit == "MemAvailable");
  CHECK(tree.headroom(false).free_bytes == kNoLimit);
}

TEST_CASE("a_group_leaves_its_limit_less_what_it_uses") {
  Tree tree;
  tree.add("/proc/self/cgroup", "0::/job\n").add_v2("/job", "1000000", 300000);
  CHECK(tree.headroom().free_bytes == 700000);
  CHECK(tree.headroom().limit == tree.root() + "/sys/fs/cgroup/job");
}

TEST_CASE("reclaimable_page_cache_counts_as_free") {
  Tree tree;
  tree.add("/proc/self/cgroup", "0::/job\n").add_v2("/job", "1000000", 300000, 200000);
  CHECK(tree.headroom().free_bytes == 900000);
  tree.add_v2("/job", "1000000", 300000, 400000);  // counters may disagree for a moment
  CHECK(tree.headroom().free_bytes == 1000000);
}

TEST_CASE("a_group_above_its_limit_leaves_nothing") {
  Tree tree;
  tree.add("/proc/self/cgroup", "0::/job\n").add_v2("/job", "1000", 5000);
  CHECK(tree.headroom().free_bytes == 0);
}

TEST_CASE("the_tightest_ancestor_decides") {
  Tree tree;
  tree.add("/proc/self/cgroup", "0::/a/b/c\n")
      .add_v2("/a/b/c", "9000", 0)
      .add_v2("/a/b", "max", 0)
      .add_v2("/a", "8000", 7000)
      .add_v2("", "6000", 1000);
  CHECK(tree.headroom().free_bytes == 1000);
  CHECK(tree.headroom().limit == tree.root() + "/sys/fs/cgroup/a");
  tree.add_v2("", "6000", 5500);  // the mount point itself: a container's own group
  CHECK(tree.headroom().free_bytes == 500);
  CHECK(tree.headroom().limit == tree.root() + "/sys/fs/cgroup");
}

TEST_CASE("a_process_in_the_root_group_is_limited_by_the_mount_point") {
  Tree tree;
  tree.add("/proc/self/cgroup", "0::/\n").add_v2("", "6000", 1000);
  CHECK(tree.headroom().free_bytes == 5000);
}

TEST_CASE("a_group_without_a_limit_sets_none") {
  Tree tree;
  tree.add("/proc/self/cgroup", "0::/job\n").add_v2("/job", "max", 300000);
  CHECK(tree.headroom().free_bytes == kNoLimit);
}

TEST_CASE("a_group_whose_usage_is_hidden_sets_no_limit") {
  Tree tree;
  tree.add("/proc/self/cgroup", "0::/job\n").add("/sys/fs/cgroup/job/memory.max", "1000\n");
  CHECK(tree.headroom().free_bytes == kNoLimit);
}

TEST_CASE("version_1_groups_count_reclaimable_pages_of_their_children_too") {
  Tree tree;
  tree.add("/proc/self/cgroup", "12:cpu,cpuacct:/x\n4:memory:/job/step\n1:name=systemd:/y\n")
      .add_v1("/job/step", "9223372036854771712", 100)
      .add_v1("/job", "5000", 4000, 500);
  CHECK(tree.headroom().free_bytes == 1500);
  CHECK(tree.headroom().limit == tree.root() + "/sys/fs/cgroup/memory/job");
}

TEST_CASE("memory_among_several_controllers_is_found_and_names_that_only_contain_it_are_not") {
  Tree tree;
  tree.add_v1("/job", "5000", 1000);
  tree.add("/proc/self/cgroup", "3:cpu,memory,pids:/job\n");
  CHECK(tree.headroom().free_bytes == 4000);
  tree.add("/proc/self/cgroup", "3:memory_pressure:/job\n");
  CHECK(tree.headroom().free_bytes == kNoLimit);
}

TEST_CASE("both_versions_are_read_where_both_are_mounted") {
  Tree tree;
  tree.add("/proc/self/cgroup", "4:memory:/job\n0::/job\n").add_v1("/job", "5000", 1000).add_v2("/job", "3000", 100);
  CHECK(tree.headroom().free_bytes == 2900);
}

TEST_CASE("the_system_and_the_groups_are_compared") {
  Tree tree;
  tree.add("/proc/meminfo", kMeminfo).add("/proc/self/cgroup", "0::/job\n").add_v2("/job", "4096000", 0);
  CHECK(tree.headroom(true).limit == "MemAvailable");
  tree.add_v2("/job", "1024000", 0);
  CHECK(tree.headroom(true).free_bytes == 1024000);
}

TEST_CASE("lines_that_make_no_sense_are_passed_over") {
  Tree tree;
  tree.add("/proc/self/cgroup", "\nnonsense\n4:memory\n0::\n0::relative\n0::/../..\n0::/a/\n0::/job\n")
      .add("/proc/meminfo", "MemAvailable\nMemAvailable: many kB\n\n")
      .add_v2("/job", "5000", 1000);
  CHECK(tree.headroom(true).free_bytes == 4000);
  tree.add("/sys/fs/cgroup/job/memory.max", "-1\n");
  CHECK(tree.headroom(true).free_bytes >= 4000);
  tree.add("/sys/fs/cgroup/job/memory.max", "99999999999999999999999\n");  // more than 64 bits
  CHECK(tree.headroom(true).free_bytes >= 4000);
  tree.add("/sys/fs/cgroup/job/memory.max", "");
  CHECK(tree.headroom(true).free_bytes == kNoLimit);
}

TEST_CASE("a_value_is_read_by_its_whole_key") {
  Tree tree;
  tree.add("/proc/self/cgroup", "0::/job\n").add_v2("/job", "1000", 500);
  tree.add("/sys/fs/cgroup/job/memory.stat", "inactive_file_more 400\nnot_inactive_file 300\ninactive_file 200\n");
  CHECK(tree.headroom().free_bytes == 700);
}

TEST_CASE("the_real_system_has_some_memory_left") {
  const HostHeadroom room = host_headroom(true);
  CHECK(room.free_bytes > 0);
  CHECK_FALSE(room.limit.empty());
}

}  // namespace cumem::testing
