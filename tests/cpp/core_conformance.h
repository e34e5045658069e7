// What a core promises over any driver, as cases. A case takes a driver with at least one device and leaves it as it
// found it.
#pragma once

#include <memory>
#include <vector>

#include "driver/driver.h"

namespace cumem::testing {

struct CoreCase {
  const char* name;
  void (*run)(const std::shared_ptr<Driver>&);
};

const std::vector<CoreCase>& core_cases();

// Runs one case and checks that the driver's counts are what they were.
void run_case(const CoreCase& core_case, const std::shared_ptr<Driver>& driver);

// The same with each k-th driver call of a sleep and a wake made to fail, for every k.
void fail_every_call_of_a_sleep_and_a_wake(const std::shared_ptr<Driver>& driver);

}  // namespace cumem::testing
