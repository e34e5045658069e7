// The host driver's late streams, broken contexts and pinned memory.
#include <unistd.h>

#include <limits>

#include "driver/host_driver.h"
#include "driver_helpers.h"

namespace cumem::testing {
namespace {

constexpr std::uint64_t kGranule = 64 * kKiB;

std::shared_ptr<HostDriver> make(bool refuse_pinning = false) {
  HostDriverOptions options;
  options.device_bytes = 16 * kMiB;
  options.granularity_bytes = kGranule;
  options.refuse_pinning = refuse_pinning;
  return must(HostDriver::create(options));
}

// Not the guards of driver_helpers.h: on a broken device nothing can be given back.
struct Plain {
  explicit Plain(HostDriver& driver, Device device = kFirst, std::uint64_t size = kGranule)
      : address(must(driver.reserve(size))),
        handle(create(driver, size, device)),
        stream(must(driver.create_stream(device))) {
    REQUIRE_OK(driver.map(address, size, handle));
    REQUIRE_OK(driver.set_access(address, size, {device}));
  }
  DeviceAddress address;
  PhysicalHandle handle;
  StreamHandle stream;
};

}  // namespace

// --- late ---

TEST_CASE("nothing_runs_until_somebody_waits") {
  const auto driver = make();
  const Memory memory(*driver, kGranule);
  const Stream stream(*driver);
  Bytes bytes(8, 0);
  CHECK_OK(driver->fill(memory.at(), 7, 8, stream.get()));
  CHECK_OK(driver->copy_to_host(bytes.data(), memory.at(), 8, stream.get()));
  CHECK(bytes == Bytes(8, 0));
  stream.wait();
  CHECK(bytes == Bytes(8, 7));
}

TEST_CASE("each_query_runs_one_operation") {
  const auto driver = make();
  const Memory memory(*driver, kGranule);
  const Stream stream(*driver);
  const EventHandle event = must(driver->create_event(kFirst));
  Bytes first(8), second(8);
  CHECK_OK(driver->copy_to_host(first.data(), memory.at(), 8, stream.get()));
  CHECK_OK(driver->copy_to_host(second.data(), memory.at(), 8, stream.get()));
  CHECK_OK(driver->record_event(event, stream.get()));
  CHECK_OK(driver->fill(memory.at(), 0, 8, stream.get()));
  CHECK_FALSE(must(driver->query_event(event)));
  CHECK(first == Bytes(8, kFreshPoison));
  CHECK(second == Bytes(8, 0));
  CHECK(must(driver->query_event(event)));
  CHECK(second == Bytes(8, kFreshPoison));
  CHECK(must(driver->query_event(event)));
  CHECK(*reinterpret_cast<std::uint8_t*>(memory.at().value) == kFreshPoison);  // work after the record has not run
  CHECK_OK(driver->destroy_event(event));
}

TEST_CASE("a_query_leaves_other_streams_alone") {
  const auto driver = make();
  const Memory memory(*driver, kGranule);
  const Stream stream(*driver);
  const Stream other(*driver);
  const EventHandle event = must(driver->create_event(kFirst));
  Bytes bytes(8);
  CHECK_OK(driver->fill(memory.at(), 7, 8, other.get()));
  CHECK_OK(driver->copy_to_host(bytes.data(), memory.at(), 8, stream.get()));
  CHECK_OK(driver->record_event(event, stream.get()));
  CHECK(must(driver->query_event(event)));
  CHECK(bytes == Bytes(8, kFreshPoison));
  CHECK_OK(driver->destroy_event(event));
}

TEST_CASE("an_event_outlives_its_stream_and_is_reached") {
  const auto driver = make();
  const Memory memory(*driver, kGranule);
  const StreamHandle stream = must(driver->create_stream(kFirst));
  const EventHandle event = must(driver->create_event(kFirst));
  CHECK_OK(driver->fill(memory.at(), 7, 8, stream));
  CHECK_OK(driver->record_event(event, stream));
  CHECK_OK(driver->destroy_stream(stream));
  CHECK(must(driver->query_event(event)));
  CHECK_OK(driver->destroy_event(event));
}

TEST_CASE("a_launched_kernel_runs_after_all_streams_of_its_device") {
  const auto driver = make();
  const Memory memory(*driver, kGranule);
  CHECK_OK(driver->launch_fill(memory.at(), 7, 8));
  CHECK(driver->counts().streams == 0);
  const Stream stream(*driver);
  Bytes bytes(8);
  CHECK_OK(driver->copy_to_host(bytes.data(), memory.at(), 8, stream.get()));
  stream.wait();
  CHECK(bytes == Bytes(8, kFreshPoison));  // the copy did not wait for the kernel
  CHECK(read(*driver, memory.at(), 8) == Bytes(8, 7));
}

TEST_CASE("a_kernel_runs_on_the_device_that_owns_its_pages") {
  const auto driver = make();
  const Memory memory(*driver, kGranule, kSecond);
  CHECK_OK(driver->launch_fill(memory.at(), 7, 8));
  CHECK_OK(driver->synchronize(kFirst));
  CHECK(*reinterpret_cast<std::uint8_t*>(memory.at().value) == kFreshPoison);
  CHECK_OK(driver->synchronize(kSecond));
  CHECK(*reinterpret_cast<std::uint8_t*>(memory.at().value) == 7);
}

TEST_CASE("launching_on_unmapped_memory_is_refused") {
  const auto driver = make();
  const Range range(*driver, kGranule);
  CHECK_REFUSED(driver->launch_fill(range.at(), 7, 8));
}

TEST_CASE("work_of_no_bytes_is_none") {
  const auto driver = make();
  const Stream stream(*driver);
  CHECK_OK(driver->fill(DeviceAddress(1), 0, 0, stream.get()));
  CHECK_OK(driver->copy_to_host(nullptr, DeviceAddress(1), 0, stream.get()));
  stream.wait();
}

TEST_CASE("pages_unmapped_under_queued_work_are_an_illegal_access") {
  const auto driver = make();
  const Plain plain(*driver);
  CHECK_OK(driver->fill(plain.address, 7, 8, plain.stream));
  CHECK_OK(driver->unmap(plain.address, kGranule));
  CHECK_CODE(kContextBroken, driver->synchronize(kFirst));
}

// --- illegal accesses ---

TEST_CASE("work_past_the_end_of_a_mapping_is_an_illegal_access") {
  const auto driver = make();
  const Plain plain(*driver);
  CHECK_OK(driver->fill(plain.address + 1, 7, kGranule, plain.stream));
  CHECK_CODE(kContextBroken, driver->synchronize(kFirst));
}

TEST_CASE("work_on_a_mapping_without_access_is_an_illegal_access") {
  const auto driver = make();
  const Plain plain(*driver, kFirst, 2 * kGranule);
  CHECK_OK(driver->unmap(plain.address, 2 * kGranule));
  CHECK_OK(driver->map(plain.address, 2 * kGranule, plain.handle));
  CHECK_OK(driver->fill(plain.address, 7, 8, plain.stream));
  CHECK_CODE(kContextBroken, driver->destroy_stream(plain.stream));
}

TEST_CASE("a_peer_without_access_breaks_its_own_device_only") {
  const auto driver = make();
  const Plain first(*driver, kFirst);
  const Plain second(*driver, kSecond);
  CHECK_OK(driver->fill(first.address, 7, 8, second.stream));
  CHECK_CODE(kContextBroken, driver->synchronize(kSecond));
  CHECK_OK(driver->fill(first.address, 8, 8, first.stream));
  CHECK(read(*driver, first.address, 8) == Bytes(8, 8));
}

TEST_CASE("an_illegal_access_moves_no_byte_and_drops_what_is_behind_it") {
  const auto driver = make();
  const Plain plain(*driver);
  CHECK_OK(driver->fill(plain.address + 1, 7, kGranule, plain.stream));
  CHECK_OK(driver->fill(plain.address, 8, kGranule, plain.stream));
  CHECK_CODE(kContextBroken, driver->synchronize(kFirst));
  CHECK_CODE(kContextBroken, driver->synchronize(kFirst));
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(plain.address.value);
  CHECK(Bytes(bytes, bytes + kGranule) == Bytes(kGranule, kFreshPoison));
}

TEST_CASE("a_query_meets_the_illegal_access") {
  const auto driver = make();
  const Plain plain(*driver);
  const EventHandle event = must(driver->create_event(kFirst));
  CHECK_OK(driver->fill(plain.address, 7, 8, plain.stream));
  CHECK_OK(driver->fill(plain.address + kGranule, 7, 8, plain.stream));
  CHECK_OK(driver->record_event(event, plain.stream));
  CHECK_FALSE(must(driver->query_event(event)));
  CHECK_CODE(kContextBroken, driver->query_event(event));
  CHECK_CODE(kContextBroken, driver->query_event(event));
}

TEST_CASE("every_call_that_concerns_a_broken_device_fails") {
  const auto driver = make();
  const Plain plain(*driver);
  const EventHandle event = must(driver->create_event(kFirst));
  const PhysicalHandle exportable = create(*driver, kGranule, kFirst, true);
  const DeviceAddress spare = must(driver->reserve(kGranule));
  const int fd = must(driver->export_fd(exportable));
  Bytes bytes(8);
  const DriverCounts before = driver->counts();
  CHECK_OK(driver->fill(spare, 7, 8, plain.stream));
  CHECK_CODE(kContextBroken, driver->synchronize(kFirst));

  CHECK_CODE(kContextBroken, driver->properties(kFirst));
  CHECK_CODE(kContextBroken, driver->memory_info(kFirst));
  CHECK_CODE(kContextBroken, driver->can_access_peer(kFirst, kSecond));
  CHECK_CODE(kContextBroken, driver->can_access_peer(kSecond, kFirst));
  CHECK_CODE(kContextBroken, driver->create(kGranule, {kFirst, false, false}));
  CHECK_CODE(kContextBroken, driver->release(plain.handle));
  CHECK_CODE(kContextBroken, driver->map(spare, kGranule, exportable));
  CHECK_CODE(kContextBroken, driver->set_access(plain.address, kGranule, {kFirst}));
  CHECK_CODE(kContextBroken, driver->set_access(plain.address, kGranule, {kSecond}));
  CHECK_CODE(kContextBroken, driver->unmap(plain.address, kGranule));
  CHECK_CODE(kContextBroken, driver->address_free(plain.address, kGranule));
  CHECK_CODE(kContextBroken, driver->export_fd(exportable));
  CHECK_CODE(kContextBroken, driver->import_fd(fd, kGranule));
  CHECK_CODE(kContextBroken, driver->create_stream(kFirst));
  CHECK_CODE(kContextBroken, driver->destroy_stream(plain.stream));
  CHECK_CODE(kContextBroken, driver->create_event(kFirst));
  CHECK_CODE(kContextBroken, driver->destroy_event(event));
  CHECK_CODE(kContextBroken, driver->record_event(event, plain.stream));
  CHECK_CODE(kContextBroken, driver->query_event(event));
  CHECK_CODE(kContextBroken, driver->copy_to_host(bytes.data(), plain.address, 8, plain.stream));
  CHECK_CODE(kContextBroken, driver->copy_to_device(plain.address, bytes.data(), 8, plain.stream));
  CHECK_CODE(kContextBroken, driver->fill(plain.address, 0, 8, plain.stream));
  CHECK_CODE(kContextBroken, driver->launch_fill(plain.address, 0, 8));
  CHECK_CODE(kContextBroken, driver->synchronize(kFirst));
  CHECK(driver->counts() == before);
  CHECK(driver->device_count() == 2);

  CHECK_OK(driver->address_free(spare, kGranule));
  const Memory other(*driver, kGranule, kSecond);
  CHECK(read(*driver, other.at(), 8, kSecond) == Bytes(8, kFreshPoison));
  close(fd);
}

TEST_CASE("a_broken_context_says_what_broke_it") {
  const auto driver = make();
  const Plain plain(*driver);
  CHECK_OK(driver->copy_to_device(plain.address + kGranule, "abcd", 4, plain.stream));
  CHECK_CODE(kContextBroken, driver->synchronize(kFirst));
  const std::string message = driver->memory_info(kFirst).status().message();
  CHECK(message.find("copy to the device") != std::string::npos);
  CHECK(message.find("device 0") != std::string::npos);
}

// --- pinned memory ---

TEST_CASE("pinning_can_be_refused_and_copies_still_work") {
  const auto driver = make(true);
  const Memory memory(*driver, kGranule);
  const HostMemory host(kGranule);
  CHECK_CODE(kUnsupported, driver->register_host(host.at(), kGranule));
  CHECK_REFUSED(driver->unregister_host(host.at()));
  const Stream stream(*driver);
  CHECK_OK(driver->copy_to_host(host.at(), memory.at(), kGranule, stream.get()));
  stream.wait();
  CHECK(*host.at(kGranule - 1) == kFreshPoison);
}

TEST_CASE("memory_unregistered_under_a_queued_copy_is_an_illegal_access") {
  const HostMemory host(kGranule);
  for (const bool again : {false, true}) {
    const auto driver = make();
    const Plain plain(*driver);
    CHECK_OK(driver->register_host(host.at(), kGranule));
    CHECK_OK(driver->copy_to_host(host.at(), plain.address, 8, plain.stream));
    CHECK_OK(driver->unregister_host(host.at()));
    if (again) CHECK_OK(driver->register_host(host.at(), kGranule));
    CHECK_CODE(kContextBroken, driver->synchronize(kFirst));
  }
}

TEST_CASE("host_ranges_are_checked_when_the_copy_is_queued") {
  const auto driver = make();
  const Plain plain(*driver);
  const HostMemory host(2 * kGranule);
  CHECK_OK(driver->register_host(host.at(100), kGranule));
  const auto copy = [&](std::uint64_t offset, std::uint64_t size) {
    return driver->copy_to_host(host.at(offset), plain.address, size, plain.stream);
  };
  CHECK_REFUSED(copy(0, 101));
  CHECK_REFUSED(copy(99, kGranule));
  CHECK_REFUSED(copy(kGranule + 99, 2));
  CHECK_REFUSED(copy(0, 2 * kGranule));
  CHECK_OK(copy(0, 100));
  CHECK_OK(copy(100, kGranule));
  CHECK_OK(copy(kGranule + 100, 1));
  CHECK_OK(driver->synchronize(kFirst));
}

TEST_CASE("device_memory_is_no_host_memory") {
  const auto driver = make();
  const Plain a(*driver);
  const Plain b(*driver);
  void* const device = reinterpret_cast<void*>(b.address.value);
  CHECK_REFUSED(driver->register_host(device, kGranule));
  CHECK_REFUSED(driver->copy_to_host(device, a.address, 8, a.stream));
  CHECK_REFUSED(driver->copy_to_device(a.address, device, 8, a.stream));
}

TEST_CASE("what_is_no_memory_of_the_process_cannot_be_registered") {
  const auto driver = make();
  void* gone = nullptr;
  {
    const HostMemory host(kGranule);
    gone = host.at();
  }
  CHECK_REFUSED(driver->register_host(gone, kGranule));
  CHECK_REFUSED(driver->register_host(nullptr, kGranule));
  const HostMemory host(kGranule);
  CHECK_REFUSED(driver->register_host(host.at(), 0));
  CHECK_REFUSED(driver->register_host(host.at(), std::numeric_limits<std::uint64_t>::max() - 1));
  CHECK(driver->counts().registrations == 0);
}

TEST_CASE("copies_from_nowhere_are_refused") {
  const auto driver = make();
  const Memory memory(*driver, kGranule);
  const Stream stream(*driver);
  const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  Bytes bytes(8);
  CHECK_REFUSED(driver->copy_to_device(memory.at(), nullptr, 8, stream.get()));
  CHECK_REFUSED(driver->copy_to_host(bytes.data(), memory.at(), most, stream.get()));
  CHECK_REFUSED(driver->fill(memory.at(), 0, most, stream.get()));
}

}  // namespace cumem::testing
