#include "cuda_fence.h"

#include <chrono>
#include <thread>

namespace cumem {
namespace {

constexpr std::size_t kBytes = 16;
constexpr auto kHostWork = std::chrono::milliseconds(3);

void CUDA_CB slow_work(void* ran) {
  std::this_thread::sleep_for(kHostWork);
  static_cast<std::atomic<bool>*>(ran)->store(true);
}

}  // namespace

bool CudaFence::prove() {
  CUdeviceptr block = 0;
  CUstream stream = nullptr;
  if (api_.cuMemAlloc(&anchor_, kBytes) != CUDA_SUCCESS) return false;
  if (api_.cuMemAlloc(&block, kBytes) != CUDA_SUCCESS) return false;
  if (api_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) {
    (void)api_.cuMemFree(block);
    return false;
  }
  const bool launched = api_.cuLaunchHostFunc(stream, &slow_work, &ran_) == CUDA_SUCCESS;
  const bool freed = api_.cuMemFree(block) == CUDA_SUCCESS;
  const bool waited = launched && freed && ran_.load();
  while (launched && !ran_.load()) std::this_thread::sleep_for(kHostWork);  // ran_ is ours: let the function end
  (void)api_.cuStreamDestroy(stream);
  return waited;
}

CUresult CudaFence::wait() {
  std::call_once(once_, [this] { waits_ = prove(); });
  CUdeviceptr block = 0;
  if (waits_ && api_.cuMemAlloc(&block, kBytes) == CUDA_SUCCESS) return api_.cuMemFree(block);
  return api_.cuCtxSynchronize();
}

}  // namespace cumem
