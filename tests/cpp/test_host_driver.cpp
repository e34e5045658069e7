// The host driver: the shared laws, and what only it promises about memory. Its streams: test_host_streams.cpp.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "driver/host_driver.h"
#include "driver_conformance.h"
#include "driver_helpers.h"

namespace cumem::testing {
namespace {

HostDriverOptions small() {
  HostDriverOptions options;
  options.device_bytes = 64 * kMiB;
  options.granularity_bytes = 64 * kKiB;
  return options;
}

std::shared_ptr<HostDriver> make(const HostDriverOptions& options = small()) {
  return must(HostDriver::create(options));
}

// The bytes of real memory under the descriptors of this process whose name contains `name`.
std::uint64_t real_bytes(const std::string& name) {
  std::uint64_t bytes = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    char target[256] = {};
    if (readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), target, sizeof target - 1) < 0) continue;
    struct stat info = {};
    if (std::string(target).find(name) != std::string::npos && fstat(fd, &info) == 0) {
      bytes += static_cast<std::uint64_t>(info.st_blocks) * 512;
    }
  }
  return bytes;
}

// Runs `work` in a child; what waitpid says of it. The child ends with what `work` returns.
int in_child(const std::function<int()>& work) {
  std::cout.flush();  // or the child's end may print it once more
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL);  // sanitizers turn the fault into an exit
    _exit(work());
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return status;
}

int touch(DeviceAddress address) {
  *reinterpret_cast<volatile std::uint8_t*>(address.value) = 1;
  return 0;
}

bool touching_faults(DeviceAddress address) {
  const int status = in_child([address] { return touch(address); });
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

}  // namespace

TEST_CASE("host_driver_keeps_the_laws_of_memory") {
  for (const ConformanceCase& law : memory_cases()) {
    SUBCASE(law.name) { run_case(law, *make()); }
  }
}

TEST_CASE("host_driver_keeps_the_laws_of_work") {
  for (const ConformanceCase& law : work_cases()) {
    SUBCASE(law.name) { run_case(law, *make()); }
  }
}

TEST_CASE("host_driver_keeps_the_laws_with_one_device_and_pages_as_granules") {
  HostDriverOptions options = small();
  options.device_count = 1;
  options.granularity_bytes = 4 * kKiB;
  const auto driver = make(options);
  for (const ConformanceCase& law : memory_cases()) run_case(law, *driver);
  for (const ConformanceCase& law : work_cases()) run_case(law, *driver);
}

TEST_CASE("options_that_describe_no_device_are_refused") {
  const auto refuses = [](auto change) {
    HostDriverOptions options = small();
    change(options);
    CHECK_CODE(kInvalidValue, HostDriver::create(options));
  };
  refuses([](HostDriverOptions& o) { o.device_count = 0; });
  refuses([](HostDriverOptions& o) { o.device_count = kMaxHostDevices + 1; });
  refuses([](HostDriverOptions& o) { o.device_bytes = 0; });
  refuses([](HostDriverOptions& o) { o.device_bytes += 1; });
  refuses([](HostDriverOptions& o) { o.granularity_bytes = 0; });
  refuses([](HostDriverOptions& o) { o.granularity_bytes = 512; });
  refuses([](HostDriverOptions& o) { o.granularity_bytes = 96 * kKiB; });
}

TEST_CASE("devices_have_uuids_of_their_own") {
  const auto a = make();
  const auto b = make();
  CHECK(must(a->properties(kFirst)).uuid != must(a->properties(kSecond)).uuid);
  CHECK(must(a->properties(kFirst)).uuid != must(b->properties(kFirst)).uuid);
}

TEST_CASE("fresh_pages_are_poisoned_also_where_old_ones_were") {
  const auto driver = make();
  const std::uint64_t size = 2 * kMiB + 64 * kKiB;
  for (const bool exportable : {false, true}) {
    for (int round = 0; round < 2; ++round) {
      const Memory memory(*driver, size, kFirst, exportable);
      CHECK(read(*driver, memory.at(), size) == Bytes(size, kFreshPoison));
      write(*driver, memory.at(), Bytes(size, 1));
    }
  }
}

TEST_CASE("all_of_a_device_can_be_created_and_not_a_granule_more") {
  const auto driver = make();
  const std::uint64_t g = small().granularity_bytes;
  const PhysicalHandle rest = create(*driver, small().device_bytes - g);
  const PhysicalHandle last = create(*driver, g);
  const Status status = driver->create(g, {kFirst, true, false}).status();
  CHECK_CODE(kOutOfDeviceMemory, status);
  CHECK(status.needed_bytes() == g);
  CHECK(status.free_bytes() == 0);
  CHECK_OK(driver->release(rest));
  CHECK_OK(driver->release(last));
}

TEST_CASE("scattered_free_pages_make_one_large_handle") {
  const auto driver = make();
  const std::uint64_t g = small().granularity_bytes;
  std::vector<PhysicalHandle> handles;
  while (free_bytes(*driver) > 0) handles.push_back(create(*driver, g));
  for (std::size_t i = 0; i < handles.size(); i += 2) CHECK_OK(driver->release(handles[i]));
  const PhysicalHandle large = create(*driver, small().device_bytes / 2);
  CHECK(free_bytes(*driver) == 0);
  CHECK_OK(driver->release(large));
  for (std::size_t i = 1; i < handles.size(); i += 2) CHECK_OK(driver->release(handles[i]));
  CHECK(free_bytes(*driver) == small().device_bytes);
}

TEST_CASE("living_pages_are_never_shared_whatever_was_released_before") {
  const auto driver = make();
  const std::uint64_t g = small().granularity_bytes;
  std::mt19937 random(7);  // NOLINT: the same sequence every time
  std::vector<std::unique_ptr<Memory>> memories(24);
  std::vector<Bytes> contents(memories.size());
  for (int step = 0; step < 400; ++step) {
    const std::size_t i = random() % memories.size();
    if (memories[i] != nullptr) {
      REQUIRE(read(*driver, memories[i]->at(), contents[i].size()) == contents[i]);
      memories[i].reset();
      continue;
    }
    const std::uint64_t size = (1 + random() % 6) * g;
    memories[i] = std::make_unique<Memory>(*driver, size, kFirst, random() % 8 == 0);
    contents[i] = Bytes(size, static_cast<std::uint8_t>(step));
    write(*driver, memories[i]->at(), contents[i]);
  }
  std::uint64_t live = 0;
  for (std::size_t i = 0; i < memories.size(); ++i) live += memories[i] != nullptr ? contents[i].size() : 0;
  CHECK(free_bytes(*driver) == small().device_bytes - live);
}

TEST_CASE("thousands_of_handles_take_no_descriptors") {
  HostDriverOptions options = small();
  options.granularity_bytes = 4 * kKiB;
  const auto driver = make(options);
  const std::uint64_t count = 4000;
  const Range range(*driver, count * 4 * kKiB);
  for (std::uint64_t i = 0; i < count; ++i) {
    const PhysicalHandle handle = create(*driver, 4 * kKiB);
    REQUIRE_OK(driver->map(range.at(i * 4 * kKiB), 4 * kKiB, handle));
    REQUIRE_OK(driver->release(handle));
  }
  CHECK_OK(driver->set_access(range.at(), count * 4 * kKiB, {kFirst}));
  CHECK(read(*driver, range.at(), count * 4 * kKiB) == Bytes(count * 4 * kKiB, kFreshPoison));
  CHECK_OK(driver->unmap(range.at(), count * 4 * kKiB));
  CHECK(free_bytes(*driver) == options.device_bytes);
}

TEST_CASE("bytes_of_released_pages_leave_the_machines_memory") {
  const auto driver = make();
  const std::uint64_t size = 16 * kMiB;
  const std::uint64_t before = real_bytes("cumem-device");
  const PhysicalHandle kept = create(*driver, size);
  const PhysicalHandle gone = create(*driver, size);
  const PhysicalHandle exportable = create(*driver, size, kFirst, true);
  CHECK(real_bytes("cumem-device") == before + 2 * size);
  CHECK(real_bytes("cumem-exportable") == size);
  CHECK_OK(driver->release(gone));
  CHECK_OK(driver->release(exportable));
  CHECK(real_bytes("cumem-device") == before + size);
  CHECK(real_bytes("cumem-exportable") == 0);
  CHECK_OK(driver->release(kept));
  CHECK(real_bytes("cumem-device") == before);
}

TEST_CASE("unmap_over_a_hole_is_refused_and_unmaps_nothing") {
  const auto driver = make();
  const std::uint64_t g = small().granularity_bytes;
  const Range range(*driver, 3 * g);
  const PhysicalHandle handle = create(*driver, g);
  for (const std::uint64_t offset : {std::uint64_t{0}, 2 * g}) CHECK_OK(driver->map(range.at(offset), g, handle));
  CHECK_REFUSED(driver->unmap(range.at(), 3 * g));
  CHECK(driver->counts().mappings == 2);
  CHECK_OK(driver->unmap(range.at(), g));
  CHECK_OK(driver->unmap(range.at(2 * g), g));
  CHECK_OK(driver->release(handle));
}

TEST_CASE("sizes_and_addresses_at_the_end_of_64_bits_are_refused") {
  const auto driver = make();
  const std::uint64_t g = small().granularity_bytes;
  const std::uint64_t most = std::numeric_limits<std::uint64_t>::max() / g * g;
  const Range range(*driver, g);
  const PhysicalHandle handle = create(*driver, g);
  CHECK_CODE(kOutOfDeviceMemory, driver->reserve(most));
  CHECK_CODE(kOutOfDeviceMemory, driver->create(most, {kFirst, false, false}));
  CHECK_REFUSED(driver->map(DeviceAddress(most), g, handle));
  CHECK_REFUSED(driver->unmap(DeviceAddress(most), 2 * g));
  CHECK_REFUSED(driver->set_access(DeviceAddress(g), most, {kFirst}));
  CHECK_OK(driver->release(handle));
}

TEST_CASE("rdma_pages_are_unsupported") {
  const auto driver = make();
  CHECK_FALSE(must(driver->properties(kFirst)).rdma);
  CHECK_CODE(kUnsupported, driver->create(small().granularity_bytes, {kFirst, false, true}));
}

TEST_CASE("descriptors_that_are_no_export_are_refused") {
  const auto driver = make();
  const std::uint64_t g = small().granularity_bytes;
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  CHECK_REFUSED(driver->import_fd(null, g));
  CHECK_REFUSED(driver->import_fd(-1, g));
  close(null);
  const int file = memfd_create("no export", MFD_CLOEXEC);
  REQUIRE(ftruncate(file, static_cast<off_t>(g)) == 0);
  CHECK_REFUSED(driver->import_fd(file, g));
  close(file);
  const PhysicalHandle handle = create(*driver, g, kFirst, true);
  const int fd = must(driver->export_fd(handle));
  CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
  CHECK_REFUSED(driver->import_fd(fd, 2 * g));
  CHECK_REFUSED(driver->import_fd(fd, g - 1));
  close(fd);
  CHECK_OK(driver->release(handle));
}

TEST_CASE("another_driver_imports_and_the_exporter_is_charged_until_it_lets_go") {
  const auto owner = make();
  const auto importer = make();
  const std::uint64_t g = small().granularity_bytes;
  const std::uint64_t total = small().device_bytes;
  const PhysicalHandle handle = create(*owner, g, kSecond, true);
  const int fd = must(owner->export_fd(handle));
  const PhysicalHandle import = must(importer->import_fd(fd, g));
  close(fd);
  CHECK_OK(owner->release(handle));
  CHECK(free_bytes(*owner, kSecond) == total - g);
  CHECK(free_bytes(*importer, kFirst) == total);
  CHECK(importer->counts().physical_bytes == g);
  CHECK_OK(importer->release(import));
  CHECK(free_bytes(*owner, kSecond) == total);
}

TEST_CASE("an_export_of_smaller_granules_is_refused") {
  HostDriverOptions options = small();
  options.granularity_bytes = 4 * kKiB;
  const auto owner = make(options);
  const PhysicalHandle handle = create(*owner, 4 * kKiB, kFirst, true);
  const int fd = must(owner->export_fd(handle));
  CHECK_REFUSED(make()->import_fd(fd, 4 * kKiB));
  close(fd);
  CHECK_OK(owner->release(handle));
}

// In a child: imports `fd` with a driver of its own, writes over the pages, reports through `done`, and lives until
// `end` is closed.
int write_through_import(int fd, std::uint64_t size, std::uint8_t byte, int done, int end) {
  const auto own = HostDriver::create(small());
  if (!own.ok()) return 1;
  HostDriver& driver = *own.value();
  const auto import = driver.import_fd(fd, size);
  const auto address = driver.reserve(size);
  close(fd);
  if (!import.ok() || !address.ok()) return 2;
  if (!driver.map(address.value(), size, import.value()).ok()) return 3;
  if (!driver.set_access(address.value(), size, {kFirst}).ok() || !driver.release(import.value()).ok()) return 4;
  std::fill_n(reinterpret_cast<std::uint8_t*>(address.value().value), size, byte);
  char ignored = 0;
  return ::write(done, "d", 1) == 1 && ::read(end, &ignored, 1) == 0 ? 0 : 5;
}

TEST_CASE("pages_shared_with_another_process_are_charged_until_it_ends") {
  const auto driver = make();
  const std::uint64_t g = small().granularity_bytes;
  auto memory = std::make_unique<Memory>(*driver, g, kFirst, true);
  const int fd = must(driver->export_fd(memory->handle()));
  int done[2], end[2];
  REQUIRE(pipe2(done, O_CLOEXEC) == 0);
  REQUIRE(pipe2(end, O_CLOEXEC) == 0);
  std::cout.flush();
  const pid_t child = fork();
  if (child == 0) {
    close(end[1]);
    _exit(write_through_import(fd, g, 42, done[1], end[0]));
  }
  close(fd);
  close(done[1]);  // a child that failed ends the read below
  char ignored = 0;
  CHECK(::read(done[0], &ignored, 1) == 1);
  CHECK(read(*driver, memory->at(), g) == Bytes(g, 42));
  memory.reset();
  CHECK(free_bytes(*driver) == small().device_bytes - g);
  for (const int left : {end[0], end[1], done[0]}) close(left);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(free_bytes(*driver) == small().device_bytes);
}

// --- faults ---

TEST_CASE("memory_with_access_can_be_touched") {
  const auto driver = make();
  const Memory memory(*driver, small().granularity_bytes);
  CHECK_FALSE(touching_faults(memory.at()));
  CHECK(read(*driver, memory.at(), 1) == Bytes(1, 1));
}

TEST_CASE("touching_reserved_memory_faults") {
  const auto driver = make();
  const Range range(*driver, small().granularity_bytes);
  CHECK(touching_faults(range.at()));
}

TEST_CASE("a_fresh_mapping_has_no_access") {
  const auto driver = make();
  const std::uint64_t g = small().granularity_bytes;
  const Range range(*driver, g);
  const PhysicalHandle handle = create(*driver, g);
  CHECK_OK(driver->map(range.at(), g, handle));
  CHECK(touching_faults(range.at()));
  CHECK_OK(driver->set_access(range.at(), g, {kFirst}));
  CHECK_FALSE(touching_faults(range.at()));
  CHECK_OK(driver->unmap(range.at(), g));
  CHECK_OK(driver->map(range.at(), g, handle));
  CHECK(touching_faults(range.at()));
  CHECK_OK(driver->unmap(range.at(), g));
  CHECK_OK(driver->release(handle));
}

TEST_CASE("touching_unmapped_memory_faults") {
  const auto driver = make();
  const std::uint64_t g = small().granularity_bytes;
  DeviceAddress address;
  {
    const Range range(*driver, 2 * g);
    const PhysicalHandle handle = create(*driver, 2 * g);
    address = range.at(g);
    CHECK_OK(driver->map(range.at(), 2 * g, handle));
    CHECK_OK(driver->set_access(range.at(), 2 * g, {kFirst}));
    CHECK_FALSE(touching_faults(address));
    CHECK_OK(driver->unmap(range.at(), 2 * g));
    CHECK(touching_faults(address));
    CHECK_OK(driver->release(handle));
  }
}

// --- the driver's end, forks, threads ---

TEST_CASE("a_destroyed_driver_takes_everything_back") {
  const std::uint64_t before = real_bytes("cumem-");
  DeviceAddress mapped;
  {
    const auto driver = make();
    const std::uint64_t g = small().granularity_bytes;
    const DeviceAddress address = must(driver->reserve(2 * g));
    REQUIRE_OK(driver->map(address, g, create(*driver, g)));
    REQUIRE_OK(driver->set_access(address, g, {kFirst}));
    create(*driver, g, kSecond, true);
    const StreamHandle stream = must(driver->create_stream(kFirst));
    REQUIRE_OK(driver->fill(address, 0, g, stream));
    REQUIRE_OK(driver->record_event(must(driver->create_event(kFirst)), stream));
    CHECK(real_bytes("cumem-") == before + 2 * g);
    mapped = address;
  }
  CHECK(real_bytes("cumem-") == before);
  CHECK(touching_faults(mapped));
}

TEST_CASE("a_forked_child_harms_nothing_of_its_parents") {
  auto driver = make();
  const std::uint64_t g = small().granularity_bytes;
  const auto memory = std::make_unique<Memory>(*driver, g);
  const PhysicalHandle exportable = create(*driver, g, kFirst, true);
  const int fd = must(driver->export_fd(exportable));
  write(*driver, memory->at(), pattern(g));
  const int status = in_child([&] {
    bool refused = code_of(driver->release(memory->handle())) == Code::kDriver;
    refused = refused && code_of(driver->memory_info(kFirst)) == Code::kDriver;
    driver.reset();  // the last reference of this process: everything is destroyed
    return refused ? 0 : 1;
  });
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(read(*driver, memory->at(), g) == pattern(g));
  CHECK(free_bytes(*driver) == small().device_bytes - 2 * g);
  close(fd);
  CHECK_OK(driver->release(exportable));
  CHECK(free_bytes(*driver) == small().device_bytes - g);
}

TEST_CASE("a_forked_child_makes_a_driver_of_its_own") {
  const auto driver = make();
  const int status = in_child([] {
    const auto own = HostDriver::create(small());
    if (!own.ok()) return 1;
    const auto handle = own.value()->create(small().granularity_bytes, {kFirst, false, false});
    return handle.ok() && own.value()->release(handle.value()).ok() ? 0 : 2;
  });
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("threads_share_a_driver") {
  const auto driver = make();
  const std::uint64_t g = small().granularity_bytes;
  std::array<int, 4> wrong{};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {  // no doctest macros here: they would order the threads
      const Device device{static_cast<int>(t % 2)};
      const StreamHandle stream = driver->create_stream(device).value();
      Bytes bytes(g);
      for (int round = 0; round < 50; ++round) {
        const DeviceAddress address = driver->reserve(g).value();
        const PhysicalHandle handle = driver->create(g, {device, round % 2 == 0, false}).value();
        const auto byte = static_cast<std::uint8_t>(t * 50 + static_cast<std::size_t>(round));
        bool good = driver->map(address, g, handle).ok() && driver->set_access(address, g, {device}).ok();
        good = good && driver->fill(address, byte, g, stream).ok();
        good = good && driver->copy_to_host(bytes.data(), address, g, stream).ok();
        good = good && driver->synchronize(device).ok();
        good = good && std::all_of(bytes.begin(), bytes.end(), [byte](std::uint8_t b) { return b == byte; });
        good = good && driver->unmap(address, g).ok() && driver->release(handle).ok();
        wrong[t] += good && driver->address_free(address, g).ok() ? 0 : 1;
      }
      wrong[t] += driver->destroy_stream(stream).ok() ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int count : wrong) CHECK(count == 0);
  CHECK(driver->counts() == DriverCounts{});
  CHECK(free_bytes(*driver) == small().device_bytes);
  CHECK(free_bytes(*driver, kSecond) == small().device_bytes);
}

}  // namespace cumem::testing
