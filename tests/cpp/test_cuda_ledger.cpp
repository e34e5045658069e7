// The cuda driver's ledger: the laws that libcuda does not check, without libcuda.
#include <limits>
#include <thread>
#include <vector>

#include "driver/cuda_ledger.h"
#include "driver_helpers.h"

namespace cumem::testing {
namespace {

constexpr std::uint64_t kGranule = 2 * kMiB;
constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
constexpr DeviceAddress kBase{64 * kGranule};
constexpr PhysicalHandle kOne{11};
constexpr PhysicalHandle kTwo{12};

// A range of eight granules; a handle of one and one of two.
struct Setup {
  Setup() {
    ledger.add_range(kBase, 8 * kGranule);
    ledger.add_handle(kOne, {kGranule, false});
    ledger.add_handle(kTwo, {2 * kGranule, true});
  }
  Status map(std::uint64_t granule, PhysicalHandle handle) {
    return ledger.add_mapping(kBase + granule * kGranule, (handle == kOne ? 1 : 2) * kGranule, handle);
  }
  CudaLedger ledger;
};

}  // namespace

TEST_CASE("a_ledger_counts_what_it_was_told") {
  Setup setup;
  CHECK_OK(setup.map(0, kOne));
  CHECK_OK(setup.map(1, kTwo));
  const DriverCounts counts = setup.ledger.counts();
  CHECK(counts.ranges == 1);
  CHECK(counts.handles == 2);
  CHECK(counts.mappings == 2);
  CHECK(counts.physical_bytes == 3 * kGranule);
  CHECK(must(setup.ledger.take_mappings(kBase, 3 * kGranule)).size() == 2);
  CHECK_OK(setup.ledger.take_handle(kOne));
  CHECK_OK(setup.ledger.take_handle(kTwo));
  CHECK_OK(setup.ledger.take_range(kBase, 8 * kGranule));
  CHECK(setup.ledger.counts() == DriverCounts{});
}

TEST_CASE("a_range_is_taken_as_it_was_added_and_empty") {
  Setup setup;
  CHECK_REFUSED(setup.ledger.take_range(kBase, 4 * kGranule));
  CHECK_REFUSED(setup.ledger.take_range(kBase + kGranule, 7 * kGranule));
  CHECK_OK(setup.map(7, kOne));
  CHECK_REFUSED(setup.ledger.take_range(kBase, 8 * kGranule));
  CHECK_OK(setup.ledger.take_mappings(kBase + 7 * kGranule, kGranule));
  CHECK_OK(setup.ledger.take_range(kBase, 8 * kGranule));
  CHECK_REFUSED(setup.ledger.take_range(kBase, 8 * kGranule));
}

TEST_CASE("a_handle_is_taken_once_for_each_time_it_was_added") {
  Setup setup;
  setup.ledger.add_handle(kOne, {kGranule, false});  // an import of it
  CHECK(setup.ledger.counts().physical_bytes == 4 * kGranule);
  CHECK(must(setup.ledger.take_handle(kOne)).size == kGranule);
  CHECK_OK(setup.ledger.take_handle(kOne));
  CHECK_REFUSED(setup.ledger.take_handle(kOne));
  CHECK_REFUSED(setup.ledger.take_handle(PhysicalHandle(0)));
}

TEST_CASE("only_handles_made_exportable_are_exportable") {
  const Setup setup;
  CHECK_OK(setup.ledger.check_exportable(kTwo));
  CHECK_REFUSED(setup.ledger.check_exportable(kOne));
  CHECK_REFUSED(setup.ledger.check_exportable(PhysicalHandle(0)));
}

TEST_CASE("a_mapping_shows_all_of_a_handle_in_free_addresses_of_one_range") {
  Setup setup;
  CHECK_REFUSED(setup.ledger.add_mapping(kBase, kGranule, kTwo));  // a part
  CHECK_REFUSED(setup.ledger.add_mapping(kBase, 2 * kGranule, kOne));
  CHECK_REFUSED(setup.ledger.add_mapping(kBase, kGranule, PhysicalHandle(0)));
  CHECK_REFUSED(setup.map(8, kOne));  // past the end
  CHECK_REFUSED(setup.map(7, kTwo));
  CHECK_REFUSED(setup.ledger.add_mapping(DeviceAddress(kMost - kGranule + 1), kGranule, kOne));
  CHECK_REFUSED(setup.ledger.add_mapping(DeviceAddress(0), kGranule, kOne));
  CHECK_OK(setup.map(2, kTwo));
  for (const std::uint64_t granule : {1, 2, 3}) CHECK_REFUSED(setup.map(granule, kTwo));
  CHECK_OK(setup.map(4, kTwo));
  CHECK_OK(setup.map(1, kOne));
  CHECK(setup.ledger.counts().mappings == 3);
}

TEST_CASE("mappings_are_taken_whole_and_without_a_hole") {
  Setup setup;
  CHECK_OK(setup.map(0, kTwo));
  CHECK_OK(setup.map(2, kOne));
  CHECK_OK(setup.map(4, kOne));
  const auto take = [&](std::uint64_t granule, std::uint64_t count) {
    return setup.ledger.take_mappings(kBase + granule * kGranule, count * kGranule);
  };
  CHECK_REFUSED(take(0, 1));
  CHECK_REFUSED(take(1, 1));
  CHECK_REFUSED(take(0, 4));  // a hole at its end
  CHECK_REFUSED(take(2, 3));  // and in its middle
  CHECK_REFUSED(take(6, 1));
  CHECK_REFUSED(take(0, 0));
  CHECK_REFUSED(setup.ledger.take_mappings(kBase, kMost));
  CHECK(setup.ledger.counts().mappings == 3);
  CHECK_OK(setup.ledger.check_mapped(kBase, 3 * kGranule));
  CHECK_REFUSED(setup.ledger.check_mapped(kBase, 4 * kGranule));
  CHECK(must(take(0, 3)).size() == 2);
  CHECK_REFUSED(setup.ledger.check_mapped(kBase, 3 * kGranule));
  CHECK(setup.ledger.counts().mappings == 1);
}

TEST_CASE("mappings_that_were_put_back_are_as_before") {
  Setup setup;
  CHECK_OK(setup.map(0, kTwo));
  const auto taken = must(setup.ledger.take_mappings(kBase, 2 * kGranule));
  setup.ledger.put_back(taken);
  CHECK_REFUSED(setup.map(1, kOne));
  CHECK_OK(setup.ledger.take_mappings(kBase, 2 * kGranule));
}

TEST_CASE("threads_share_a_ledger") {
  CudaLedger ledger;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&ledger, t] {
      const DeviceAddress address = kBase + t * kGranule;
      const PhysicalHandle handle(100 + t);
      for (int i = 0; i < 200; ++i) {
        ledger.add_range(address, kGranule);
        ledger.add_handle(handle, {kGranule, false});
        const bool good = ledger.add_mapping(address, kGranule, handle).ok() && ledger.counts().handles >= 1 &&
                          ledger.take_mappings(address, kGranule).ok() && ledger.take_handle(handle).ok() &&
                          ledger.take_range(address, kGranule).ok();
        if (!good) return;  // what is left shows in the counts
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(ledger.counts() == DriverCounts{});
}

}  // namespace cumem::testing
