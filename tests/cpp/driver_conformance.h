// The laws of csrc/driver/driver.h as cases that any driver must pass. A case takes a driver with at least one device,
// leaves it as it found it, and is named by the law it checks. What a driver over a real device does not promise, and
// what others on that device disturb, a case leaves out there. No case breaks a context.
#pragma once

#include <string>
#include <vector>

#include "driver/driver.h"

namespace cumem::testing {

struct ConformanceCase {
  const char* name;
  void (*run)(Driver&);
};

const std::vector<ConformanceCase>& memory_cases();  // driver_conformance.cpp
const std::vector<ConformanceCase>& work_cases();    // driver_conformance_work.cpp

// Runs one case and checks that the driver's counts are what they were.
void run_case(const ConformanceCase& conformance_case, Driver& driver);

}  // namespace cumem::testing
