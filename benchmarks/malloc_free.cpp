// Time of malloc plus free of one segment, beside the bare driver calls that it cannot do without.
// Prints JSON: {"size_bytes", "rounds", "bare_us", "cumem_us", "ratio"}, medians. Arguments: size in MiB, rounds.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core.h"
#include "driver/cuda_api.h"
#include "driver/cuda_driver.h"

using namespace cumem;

namespace {

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "%s: %s\n", result.status().call().c_str(), result.status().message().c_str());
    std::exit(1);
  }
  return std::move(result).value();
}

void must(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  std::fprintf(stderr, "%s: error %d\n", call, static_cast<int>(result));
  std::exit(1);
}

void must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", status.call().c_str(), status.message().c_str());
  std::exit(1);
}

template <typename Work>
double median_us(int rounds, Work work) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<std::size_t>(rounds) / 2];
}

// The same work by hand: memory for device 0, access for it and its peers, a wait for the device before the unmap.
void bare_round(const CudaApi& api, std::size_t size, const std::vector<CUmemAccessDesc>& access, bool rdma) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  prop.allocFlags.gpuDirectRDMACapable = rdma ? 1 : 0;
  CUdeviceptr address = 0;
  CUmemGenericAllocationHandle handle = 0;
  must(api.cuMemAddressReserve(&address, size, 0, 0, 0), "reserve");
  must(api.cuMemCreate(&handle, size, &prop, 0), "create");
  must(api.cuMemMap(address, size, 0, handle, 0), "map");
  must(api.cuMemSetAccess(address, size, access.data(), access.size()), "set access");
  must(api.cuCtxSynchronize(), "synchronize");
  must(api.cuMemUnmap(address, size), "unmap");
  must(api.cuMemRelease(handle), "release");
  must(api.cuMemAddressFree(address, size), "address free");
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t size = (argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 64) * kMiB;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 501;
  auto driver = must(CudaDriver::create());
  const CudaApi& api = *must(cuda_api());
  CUcontext context = nullptr;
  must(api.cuDevicePrimaryCtxRetain(&context, 0), "context");
  must(api.cuCtxPushCurrent(context), "push");

  std::vector<CUmemAccessDesc> access;
  for (int device = 0; device < driver->device_count(); ++device) {
    if (device == 0 || must(driver->can_access_peer(Device{device}, Device{0}))) {
      access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, {device}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    }
  }
  auto core = std::make_shared<Core>(driver, CoreOptions{});
  const SlotId slot = core->create_slot();
  const bool rdma = must(driver->properties(Device{0})).rdma;
  const auto bare = [&] { bare_round(api, size, access, rdma); };
  const auto ours = [&] { must(core->free(must(core->malloc(slot, size, Device{0}, false)))); };
  (void)median_us(20, bare);
  (void)median_us(20, ours);
  // Alternating, so that a drift of the machine falls on both.
  std::vector<double> ratios, bares, cumems;
  for (int i = 0; i < 5; ++i) {
    bares.push_back(median_us(rounds, bare));
    cumems.push_back(median_us(rounds, ours));
    ratios.push_back(cumems.back() / bares.back());
  }
  for (auto* values : {&ratios, &bares, &cumems}) std::sort(values->begin(), values->end());
  std::printf("{\"size_bytes\": %zu, \"rounds\": %d, \"bare_us\": %.2f, \"cumem_us\": %.2f, \"ratio\": %.3f}\n", size, 5 * rounds,
              bares[2], cumems[2], ratios[2]);
  return 0;
}
