// The laws of host memory, streams, events, copies and waits.
#include <unistd.h>

#include <algorithm>

#include "driver_conformance.h"
#include "driver_helpers.h"

namespace cumem::testing {
namespace {

std::uint64_t page() { return static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)); }

class Event {
 public:
  explicit Event(Driver& driver, Device device = kFirst)
      : driver_(driver), handle_(must(driver.create_event(device))) {}
  Event(const Event&) = delete;
  ~Event() { CHECK_OK(driver_.destroy_event(handle_)); }
  [[nodiscard]] EventHandle get() const { return handle_; }
  void record(const Stream& stream) const { CHECK_OK(driver_.record_event(handle_, stream.get())); }
  // Polls until the event is reached; gives up (false) after far more polls than any test's work needs.
  [[nodiscard]] bool reached_in_time() const {
    for (int polls = 0; polls < 100000; ++polls) {
      if (must(driver_.query_event(handle_))) return true;
      usleep(polls < 1000 ? 0 : 100);
    }
    return false;
  }

 private:
  Driver& driver_;
  const EventHandle handle_;
};

class Registration {
 public:
  Registration(Driver& driver, void* host, std::uint64_t size) : driver_(driver), host_(host) {
    REQUIRE_OK(driver.register_host(host, size));
  }
  Registration(const Registration&) = delete;
  ~Registration() { CHECK_OK(driver_.unregister_host(host_)); }

 private:
  Driver& driver_;
  void* const host_;
};

// --- copies ---

void copies_of_any_offset_and_length_move_exactly_their_bytes(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, g);
  write(driver, memory.at(), Bytes(g, 0));
  const Bytes bytes = pattern(1001, 3);
  write(driver, memory.at(17), bytes);
  CHECK(read(driver, memory.at(17), 1001) == bytes);
  CHECK(read(driver, memory.at(), 17) == Bytes(17, 0));
  CHECK(read(driver, memory.at(17 + 1001), 100) == Bytes(100, 0));
}

void copies_cross_adjacent_mappings(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Range range(driver, 2 * g);
  for (const std::uint64_t offset : {std::uint64_t{0}, g}) {
    const PhysicalHandle handle = create(driver, g);
    CHECK_OK(driver.map(range.at(offset), g, handle));
    CHECK_OK(driver.release(handle));
  }
  CHECK_OK(driver.set_access(range.at(), 2 * g, {kFirst}));
  write(driver, range.at(), pattern(2 * g));
  CHECK(read(driver, range.at(), 2 * g) == pattern(2 * g));
  CHECK_OK(driver.unmap(range.at(), 2 * g));
}

void fill_sets_every_byte_of_its_range_and_no_other(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, g);
  const Stream stream(driver);
  CHECK_OK(driver.fill(memory.at(), 1, g, stream.get()));
  CHECK_OK(driver.fill(memory.at(5), 2, 11, stream.get()));
  stream.wait();
  Bytes expected(32, 1);
  std::fill(expected.begin() + 5, expected.begin() + 16, std::uint8_t{2});
  CHECK(read(driver, memory.at(), 32) == expected);
}

void work_of_one_stream_runs_in_order(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, g);
  const Stream stream(driver);
  Bytes before(64), after(64);
  CHECK_OK(driver.fill(memory.at(), 1, g, stream.get()));
  CHECK_OK(driver.copy_to_host(before.data(), memory.at(), 64, stream.get()));
  CHECK_OK(driver.fill(memory.at(), 2, g, stream.get()));
  CHECK_OK(driver.copy_to_host(after.data(), memory.at(), 64, stream.get()));
  stream.wait();
  CHECK(before == Bytes(64, 1));
  CHECK(after == Bytes(64, 2));
}

void calls_on_streams_and_events_that_do_not_exist_are_refused(Driver& driver) {
  if (driver.memory_kind() != MemoryKind::kHost)
    return;  // the cuda driver's handles are pointers: trusted, never guessed
  const Memory memory(driver, granularity(driver));
  Bytes bytes(8);
  const StreamHandle none(0);
  CHECK_REFUSED(driver.copy_to_host(bytes.data(), memory.at(), 8, none));
  CHECK_REFUSED(driver.copy_to_device(memory.at(), bytes.data(), 8, none));
  CHECK_REFUSED(driver.fill(memory.at(), 0, 8, none));
  CHECK_REFUSED(driver.destroy_stream(none));
  CHECK_REFUSED(driver.destroy_event(EventHandle(0)));
  CHECK_REFUSED(driver.query_event(EventHandle(0)));
}

// --- waits ---

void synchronize_waits_for_every_stream_of_the_device(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, 2 * g);
  const Stream first(driver);
  const Stream second(driver);
  Bytes a(g), b(g);
  CHECK_OK(driver.fill(memory.at(), 3, g, first.get()));
  CHECK_OK(driver.fill(memory.at(g), 4, g, second.get()));
  CHECK_OK(driver.copy_to_host(a.data(), memory.at(), g, first.get()));
  CHECK_OK(driver.copy_to_host(b.data(), memory.at(g), g, second.get()));
  CHECK_OK(driver.synchronize(kFirst));
  CHECK(a == Bytes(g, 3));
  CHECK(b == Bytes(g, 4));
}

void a_destroyed_streams_work_still_runs(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, g);
  const StreamHandle stream = must(driver.create_stream(kFirst));
  CHECK_OK(driver.fill(memory.at(), 9, g, stream));
  CHECK_OK(driver.destroy_stream(stream));
  CHECK_OK(driver.synchronize(kFirst));
  CHECK(read(driver, memory.at(), g) == Bytes(g, 9));
}

void an_event_never_recorded_is_reached(Driver& driver) {
  const Event event(driver);
  CHECK(must(driver.query_event(event.get())));
}

void a_reached_event_means_the_bytes_are_there(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, g);
  const Stream stream(driver);
  const Event event(driver);
  Bytes bytes(g);
  CHECK_OK(driver.fill(memory.at(), 5, g, stream.get()));
  CHECK_OK(driver.copy_to_host(bytes.data(), memory.at(), g, stream.get()));
  event.record(stream);
  CHECK(event.reached_in_time());
  CHECK(bytes == Bytes(g, 5));
}

void an_event_recorded_again_covers_the_later_work(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, g);
  const Stream stream(driver);
  const Event event(driver);
  Bytes bytes(g);
  event.record(stream);
  CHECK(event.reached_in_time());
  CHECK_OK(driver.fill(memory.at(), 6, g, stream.get()));
  CHECK_OK(driver.copy_to_host(bytes.data(), memory.at(), g, stream.get()));
  event.record(stream);
  CHECK(event.reached_in_time());
  CHECK(bytes == Bytes(g, 6));
}

// --- host memory ---

void registered_memory_round_trips(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, g);
  const HostMemory host(2 * g);
  const Registration registration(driver, host.at(), 2 * g);
  const Stream stream(driver);
  const Bytes bytes = pattern(g, 5);
  std::copy(bytes.begin(), bytes.end(), host.at());
  CHECK_OK(driver.copy_to_device(memory.at(), host.at(), g, stream.get()));
  CHECK_OK(driver.copy_to_host(host.at(g), memory.at(), g, stream.get()));
  stream.wait();
  CHECK(Bytes(host.at(g), host.at(g) + g) == bytes);
}

void registrations_are_counted_and_end(Driver& driver) {
  const HostMemory host(page());
  const DriverCounts before = driver.counts();
  CHECK_OK(driver.register_host(host.at(), page()));
  CHECK(driver.counts().registrations == before.registrations + 1);
  CHECK_OK(driver.unregister_host(host.at()));
  CHECK_REFUSED(driver.unregister_host(host.at()));
}

void memory_that_is_registered_cannot_be_registered_again(Driver& driver) {
  const HostMemory host(4 * page());
  const Registration registration(driver, host.at(page()), 2 * page());
  CHECK_REFUSED(driver.register_host(host.at(page()), 2 * page()));
  CHECK_REFUSED(driver.register_host(host.at(), 2 * page()));
  CHECK_REFUSED(driver.register_host(host.at(2 * page()), 2 * page()));
  CHECK_REFUSED(driver.register_host(host.at(), 4 * page()));
}

// Tries a copy of `size` bytes both ways and expects a refusal of both.
void check_host_range_refused(Driver& driver, const Memory& memory, void* host, std::uint64_t size) {
  const Stream stream(driver);
  CHECK_REFUSED(driver.copy_to_host(host, memory.at(), size, stream.get()));
  CHECK_REFUSED(driver.copy_to_device(memory.at(), host, size, stream.get()));
}

void copies_across_two_registrations_are_refused(Driver& driver) {
  const Memory memory(driver, granularity(driver));
  const HostMemory host(2 * page());
  const Registration first(driver, host.at(), page());
  const Registration second(driver, host.at(page()), page());
  check_host_range_refused(driver, memory, host.at(page() / 2), page());
}

void copies_out_of_a_registration_are_refused(Driver& driver) {
  const Memory memory(driver, granularity(driver));
  const HostMemory host(2 * page());
  const Registration registration(driver, host.at(), page());
  check_host_range_refused(driver, memory, host.at(page() / 2), page());
}

void a_refused_copy_spoils_no_later_one(Driver& driver) {
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, g);
  {
    const HostMemory host(2 * page());
    const Registration registration(driver, host.at(), page());
    check_host_range_refused(driver, memory, host.at(page() / 2), page());
  }
  CHECK_REFUSED(driver.unmap(memory.at(), 0));
  CHECK_REFUSED(driver.release(PhysicalHandle(0)));
  write(driver, memory.at(), pattern(g, 8));
  CHECK(read(driver, memory.at(), g) == pattern(g, 8));
}

// --- peers ---

void a_peer_with_access_copies_from_the_others_pages(Driver& driver) {
  if (driver.device_count() < 2 || !must(driver.can_access_peer(kSecond, kFirst))) return;
  const std::uint64_t g = granularity(driver);
  const Memory memory(driver, g, kFirst);
  CHECK_OK(driver.set_access(memory.at(), g, {kSecond}));
  write(driver, memory.at(), pattern(g, 1), kSecond);
  CHECK(read(driver, memory.at(), g, kSecond) == pattern(g, 1));
  CHECK(read(driver, memory.at(), g, kFirst) == pattern(g, 1));
}

void pages_are_taken_from_the_device_they_are_created_on(Driver& driver) {
  if (driver.device_count() < 2) return;
  const std::uint64_t size = 4 * granularity(driver);
  const std::uint64_t first = free_bytes(driver, kFirst);
  const std::uint64_t second = free_bytes(driver, kSecond);
  const PhysicalHandle handle = create(driver, size, kSecond);
  check_free_bytes(driver, first, kFirst);
  check_free_bytes(driver, second - size, kSecond);
  CHECK_OK(driver.release(handle));
}

void an_event_is_recorded_on_streams_of_its_own_device_only(Driver& driver) {
  if (driver.device_count() < 2) return;
  const Stream stream(driver, kFirst);
  const Event event(driver, kSecond);
  CHECK_REFUSED(driver.record_event(event.get(), stream.get()));
}

}  // namespace

#define CASE(name) \
  ConformanceCase { #name, name }

const std::vector<ConformanceCase>& work_cases() {
  static const std::vector<ConformanceCase> cases = {
      CASE(copies_of_any_offset_and_length_move_exactly_their_bytes),
      CASE(copies_cross_adjacent_mappings),
      CASE(fill_sets_every_byte_of_its_range_and_no_other),
      CASE(work_of_one_stream_runs_in_order),
      CASE(calls_on_streams_and_events_that_do_not_exist_are_refused),
      CASE(synchronize_waits_for_every_stream_of_the_device),
      CASE(a_destroyed_streams_work_still_runs),
      CASE(an_event_never_recorded_is_reached),
      CASE(a_reached_event_means_the_bytes_are_there),
      CASE(an_event_recorded_again_covers_the_later_work),
      CASE(registered_memory_round_trips),
      CASE(registrations_are_counted_and_end),
      CASE(memory_that_is_registered_cannot_be_registered_again),
      CASE(copies_across_two_registrations_are_refused),
      CASE(copies_out_of_a_registration_are_refused),
      CASE(a_refused_copy_spoils_no_later_one),
      CASE(a_peer_with_access_copies_from_the_others_pages),
      CASE(pages_are_taken_from_the_device_they_are_created_on),
      CASE(an_event_is_recorded_on_streams_of_its_own_device_only),
  };
  return cases;
}

}  // namespace cumem::testing
