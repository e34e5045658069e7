// The laws of devices, addresses and pages.
#include "driver_conformance.h"

#include <fcntl.h>
#include <unistd.h>

#include "driver_helpers.h"

namespace cumem::testing {
namespace {

// --- devices ---

void properties_describe_a_device_that_can(Driver& driver) {
  const DeviceProperties properties = must(driver.properties(kFirst));
  const std::uint64_t g = properties.granularity_bytes;
  CHECK(properties.virtual_memory);
  CHECK(g > 0);
  CHECK((g & (g - 1)) == 0);
  CHECK(properties.uuid.rfind("GPU-", 0) == 0);
  CHECK(properties.uuid.size() == 40);
  CHECK_FALSE(properties.name.empty());
  CHECK(properties.total_bytes >= free_bytes(driver));
}

void devices_that_do_not_exist_are_refused(Driver& driver) {
  for (const Device nowhere : {Device{driver.device_count()}, Device{-1}}) {
    CHECK_REFUSED(driver.properties(nowhere));
    CHECK_REFUSED(driver.memory_info(nowhere));
    CHECK_REFUSED(driver.create(granularity(driver), {nowhere, false, false}));
    CHECK_REFUSED(driver.create_stream(nowhere));
    CHECK_REFUSED(driver.create_event(nowhere));
    CHECK_REFUSED(driver.synchronize(nowhere));
  }
}

void no_device_is_its_own_peer(Driver& driver) { CHECK_FALSE(must(driver.can_access_peer(kFirst, kFirst))); }

// --- addresses ---

void reserved_ranges_are_aligned_and_apart(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range a(driver, 3 * g);
  const Range b(driver, g);
  CHECK(a.at().value % g == 0);
  CHECK(b.at().value % g == 0);
  CHECK((a.at(3 * g).value <= b.at().value || b.at(g).value <= a.at().value));
}

void sizes_that_are_no_multiple_of_the_granularity_are_refused(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{1}, g - 1, g + 1}) {
    CHECK_REFUSED(driver.reserve(size));
    CHECK_REFUSED(driver.create(size, {kFirst, false, false}));
  }
}

void address_free_takes_exactly_what_reserve_gave(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range range(driver, 4 * g);
  CHECK_REFUSED(driver.address_free(range.at(), 2 * g));
  CHECK_REFUSED(driver.address_free(range.at(), 8 * g));
  CHECK_REFUSED(driver.address_free(range.at(g), 3 * g));
}

void a_freed_range_cannot_be_freed_again(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const DeviceAddress address = must(driver.reserve(g));
  CHECK_OK(driver.address_free(address, g));
  CHECK_REFUSED(driver.address_free(address, g));
}

void a_range_with_something_mapped_in_it_cannot_be_freed(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, g);
  CHECK_REFUSED(driver.address_free(memory.at(), g));
}

// --- pages ---

void handles_are_counted_with_their_bytes(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const DriverCounts before = driver.counts();
  const PhysicalHandle handle = create(driver, 3 * g);
  CHECK(driver.counts().handles == before.handles + 1);
  CHECK(driver.counts().physical_bytes == before.physical_bytes + 3 * g);
  CHECK_OK(driver.release(handle));
}

void created_pages_take_free_bytes_and_released_ones_give_them_back(Driver& driver) {
  const std::uint64_t size = 8 * granularity(driver);
  const std::uint64_t before = free_bytes(driver);
  const PhysicalHandle handle = create(driver, size);
  check_free_bytes(driver, before - size);
  CHECK_OK(driver.release(handle));
  check_free_bytes(driver, before);
}

void a_create_larger_than_the_device_says_what_is_needed_and_free(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const std::uint64_t size = (must(driver.properties(kFirst)).total_bytes / g + 1) * g;
  const Status status = driver.create(size, {kFirst, false, false}).status();
  CHECK_CODE(kOutOfDeviceMemory, status);
  CHECK(status.needed_bytes() == size);
  CHECK(status.free_bytes() > 0);
  CHECK(status.free_bytes() < size);
  CHECK_OK(driver.release(create(driver, g)));
}

void a_handle_cannot_be_released_twice(Driver& driver) {
  const PhysicalHandle handle = create(driver, granularity(driver));
  CHECK_OK(driver.release(handle));
  CHECK_REFUSED(driver.release(handle));
}

void pages_come_back_once_released_and_unmapped_in_either_order(Driver& driver) {
  const std::uint64_t size = 8 * granularity(driver);
  const Range range(driver, size);
  for (const bool release_first : {true, false}) {
    const std::uint64_t before = free_bytes(driver);
    const PhysicalHandle handle = create(driver, size);
    CHECK_OK(driver.map(range.at(), size, handle));
    CHECK_OK(release_first ? driver.release(handle) : driver.unmap(range.at(), size));
    check_free_bytes(driver, before - size);
    CHECK_OK(release_first ? driver.unmap(range.at(), size) : driver.release(handle));
    check_free_bytes(driver, before);
  }
}

// --- mappings ---

void a_released_handle_stays_usable_through_its_mapping(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range range(driver, g);
  const PhysicalHandle handle = create(driver, g);
  CHECK_OK(driver.map(range.at(), g, handle));
  CHECK_OK(driver.release(handle));
  CHECK_OK(driver.set_access(range.at(), g, {kFirst}));
  write(driver, range.at(), pattern(g));
  CHECK(read(driver, range.at(), g) == pattern(g));
  CHECK_OK(driver.unmap(range.at(), g));
}

void map_into_an_occupied_range_is_refused(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range range(driver, 4 * g);
  const PhysicalHandle two = create(driver, 2 * g);
  const PhysicalHandle other = create(driver, 2 * g);
  CHECK_OK(driver.map(range.at(g), 2 * g, two));
  CHECK_OK(driver.set_access(range.at(g), 2 * g, {kFirst}));
  write(driver, range.at(g), pattern(2 * g));
  for (const std::uint64_t offset : {std::uint64_t{0}, g, 2 * g}) {
    CHECK_REFUSED(driver.map(range.at(offset), 2 * g, other));
  }
  CHECK(read(driver, range.at(g), 2 * g) == pattern(2 * g));
  CHECK_OK(driver.unmap(range.at(g), 2 * g));
  CHECK_OK(driver.release(other));
  CHECK_OK(driver.release(two));
}

void map_needs_a_reservation_a_handle_and_its_size(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range range(driver, 2 * g);
  const PhysicalHandle handle = create(driver, 2 * g);
  CHECK_REFUSED(driver.map(range.at(), g, handle));
  CHECK_REFUSED(driver.map(range.at(), 0, handle));
  CHECK_REFUSED(driver.map(range.at(), 2 * g, PhysicalHandle(0)));
  CHECK_OK(driver.map(range.at(), 2 * g, handle));
  CHECK_OK(driver.unmap(range.at(), 2 * g));
  CHECK_OK(driver.release(handle));
}

void map_at_an_unaligned_address_is_refused(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range range(driver, 3 * g);
  const PhysicalHandle handle = create(driver, g);
  CHECK_REFUSED(driver.map(range.at(g / 2), g, handle));
  CHECK_REFUSED(driver.map(range.at(1), g, handle));
  CHECK_OK(driver.release(handle));
}

void map_past_the_end_of_a_reservation_is_refused(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range range(driver, 2 * g);
  const PhysicalHandle handle = create(driver, 2 * g);
  CHECK_REFUSED(driver.map(range.at(g), 2 * g, handle));
  CHECK_OK(driver.release(handle));
}

void map_of_a_released_handle_is_refused(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range range(driver, g);
  const PhysicalHandle handle = create(driver, g);
  CHECK_OK(driver.release(handle));
  CHECK_REFUSED(driver.map(range.at(), g, handle));
}

void one_handle_mapped_twice_shows_the_same_bytes(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, g);
  const Range alias(driver, g);
  CHECK_OK(driver.map(alias.at(), g, memory.handle()));
  CHECK_OK(driver.set_access(alias.at(), g, {kFirst}));
  write(driver, memory.at(), pattern(g));
  CHECK(read(driver, alias.at(), g) == pattern(g));
  CHECK_OK(driver.unmap(alias.at(), g));
  CHECK(read(driver, memory.at(), g) == pattern(g));
}

void unmap_of_part_of_a_mapping_is_refused(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, 3 * g);
  write(driver, memory.at(), pattern(3 * g));
  CHECK_REFUSED(driver.unmap(memory.at(), g));
  CHECK_REFUSED(driver.unmap(memory.at(), 2 * g));
  CHECK_REFUSED(driver.unmap(memory.at(g), 2 * g));
  CHECK_REFUSED(driver.unmap(memory.at(), 0));
  CHECK(read(driver, memory.at(), 3 * g) == pattern(3 * g));
}

void unmap_of_what_is_not_mapped_is_refused(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range range(driver, g);
  CHECK_REFUSED(driver.unmap(range.at(), g));
}

// Maps `count` handles of one granule each from the start of `range`; the handles are released already.
void map_granules(Driver& driver, const Range& range, std::uint64_t count) {
  const std::uint64_t g = granularity(driver);
  for (std::uint64_t i = 0; i < count; ++i) {
    const PhysicalHandle handle = create(driver, g);
    REQUIRE_OK(driver.map(range.at(i * g), g, handle));
    REQUIRE_OK(driver.release(handle));
  }
}

void one_set_access_and_one_unmap_span_several_whole_mappings(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range range(driver, 4 * g);
  const DriverCounts before = driver.counts();
  map_granules(driver, range, 4);
  CHECK(driver.counts().mappings == before.mappings + 4);
  CHECK_OK(driver.set_access(range.at(), 4 * g, {kFirst}));
  write(driver, range.at(), pattern(4 * g));
  CHECK_OK(driver.unmap(range.at(g), 2 * g));
  CHECK(driver.counts().mappings == before.mappings + 2);
  const Bytes written = pattern(4 * g);
  const Bytes last(written.end() - static_cast<std::ptrdiff_t>(g), written.end());
  CHECK(read(driver, range.at(3 * g), g) == last);
  CHECK_OK(driver.unmap(range.at(), g));
  CHECK_OK(driver.unmap(range.at(3 * g), g));
}

void set_access_needs_mapped_pages_and_a_device(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range range(driver, 2 * g);
  CHECK_REFUSED(driver.set_access(range.at(), g, {kFirst}));
  map_granules(driver, range, 1);
  CHECK_REFUSED(driver.set_access(range.at(), 2 * g, {kFirst}));
  CHECK_REFUSED(driver.set_access(range.at(), g, {}));
  CHECK_REFUSED(driver.set_access(range.at(), g, {Device{driver.device_count()}}));
  CHECK_OK(driver.set_access(range.at(), g, {kFirst}));
  CHECK_OK(driver.unmap(range.at(), g));
}

void new_pages_at_an_old_address_are_other_pages(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range range(driver, g);
  const PhysicalHandle first = create(driver, g);
  const PhysicalHandle second = create(driver, g);
  const auto show = [&](PhysicalHandle handle) {
    REQUIRE_OK(driver.map(range.at(), g, handle));
    REQUIRE_OK(driver.set_access(range.at(), g, {kFirst}));
  };
  show(first);
  write(driver, range.at(), pattern(g, 1));
  CHECK_OK(driver.unmap(range.at(), g));
  show(second);
  write(driver, range.at(), pattern(g, 2));
  CHECK_OK(driver.unmap(range.at(), g));
  show(first);
  CHECK(read(driver, range.at(), g) == pattern(g, 1));
  CHECK_OK(driver.unmap(range.at(), g));
  CHECK_OK(driver.release(first));
  CHECK_OK(driver.release(second));
}

// --- export and import ---

struct Exported {
  Exported(Driver& driver, PhysicalHandle handle) : fd(must(driver.export_fd(handle))) {}
  Exported(const Exported&) = delete;
  ~Exported() { close(fd); }
  const int fd;
};

void only_handles_created_exportable_are_exported(Driver& driver) {
  const PhysicalHandle handle = create(driver, granularity(driver));
  CHECK_REFUSED(driver.export_fd(handle));
  CHECK_REFUSED(driver.export_fd(PhysicalHandle(0)));
  CHECK_OK(driver.release(handle));
}

void an_import_shows_the_exporters_pages(Driver& driver) {
  if (!must(driver.properties(kFirst)).exportable) return;
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, g, kFirst, true);
  const Exported exported(driver, memory.handle());
  const PhysicalHandle import = must(driver.import_fd(exported.fd, g));
  CHECK(fcntl(exported.fd, F_GETFD) != -1);
  const Range range(driver, g);
  CHECK_OK(driver.map(range.at(), g, import));
  CHECK_OK(driver.set_access(range.at(), g, {kFirst}));
  write(driver, memory.at(), pattern(g));
  CHECK(read(driver, range.at(), g) == pattern(g));
  CHECK_OK(driver.unmap(range.at(), g));
  CHECK_OK(driver.release(import));
}

void descriptors_and_imports_keep_released_pages(Driver& driver) {
  if (!must(driver.properties(kFirst)).exportable) return;
  const std::uint64_t g = granularity(driver);
  const Range range(driver, g);
  const std::uint64_t before = free_bytes(driver);
  const PhysicalHandle handle = create(driver, g, kFirst, true);
  PhysicalHandle import;
  {
    const Exported exported(driver, handle);
    CHECK_OK(driver.release(handle));
    check_free_bytes(driver, before - g);
    import = must(driver.import_fd(exported.fd, g));
  }
  check_free_bytes(driver, before - g);
  CHECK_OK(driver.map(range.at(), g, import));
  CHECK_OK(driver.release(import));
  check_free_bytes(driver, before - g);
  CHECK_OK(driver.unmap(range.at(), g));
  check_free_bytes(driver, before);
}

}  // namespace

#define CASE(name) \
  ConformanceCase { #name, name }

const std::vector<ConformanceCase>& memory_cases() {
  static const std::vector<ConformanceCase> cases = {
      CASE(properties_describe_a_device_that_can),
      CASE(devices_that_do_not_exist_are_refused),
      CASE(no_device_is_its_own_peer),
      CASE(reserved_ranges_are_aligned_and_apart),
      CASE(sizes_that_are_no_multiple_of_the_granularity_are_refused),
      CASE(address_free_takes_exactly_what_reserve_gave),
      CASE(a_freed_range_cannot_be_freed_again),
      CASE(a_range_with_something_mapped_in_it_cannot_be_freed),
      CASE(handles_are_counted_with_their_bytes),
      CASE(created_pages_take_free_bytes_and_released_ones_give_them_back),
      CASE(a_create_larger_than_the_device_says_what_is_needed_and_free),
      CASE(a_handle_cannot_be_released_twice),
      CASE(pages_come_back_once_released_and_unmapped_in_either_order),
      CASE(a_released_handle_stays_usable_through_its_mapping),
      CASE(map_into_an_occupied_range_is_refused),
      CASE(map_needs_a_reservation_a_handle_and_its_size),
      CASE(map_at_an_unaligned_address_is_refused),
      CASE(map_past_the_end_of_a_reservation_is_refused),
      CASE(map_of_a_released_handle_is_refused),
      CASE(one_handle_mapped_twice_shows_the_same_bytes),
      CASE(unmap_of_part_of_a_mapping_is_refused),
      CASE(unmap_of_what_is_not_mapped_is_refused),
      CASE(one_set_access_and_one_unmap_span_several_whole_mappings),
      CASE(set_access_needs_mapped_pages_and_a_device),
      CASE(new_pages_at_an_old_address_are_other_pages),
      CASE(only_handles_created_exportable_are_exported),
      CASE(an_import_shows_the_exporters_pages),
      CASE(descriptors_and_imports_keep_released_pages),
  };
  return cases;
}

void run_case(const ConformanceCase& conformance_case, Driver& driver) {
  const DriverCounts before = driver.counts();
  conformance_case.run(driver);
  CHECK(driver.counts() == before);
}

}  // namespace cumem::testing
