# Sets cumem_cuda_include to the directory of cuda.h, the only part of CUDA that the build needs. In this order:
#   1. -DCUMEM_CUDA_INCLUDE=DIR
#   2. the wheel of the build's Python: nvidia-cuda-runtime (nvidia/cu13) or nvidia-cuda-runtime-cu12 (nvidia/cuda_runtime)
#   3. /usr/local/cuda/include
#   4. the toolkit of the nvcc that CMake finds
set(cumem_cuda_include "")

if(CUMEM_CUDA_INCLUDE)
  if(NOT EXISTS "${CUMEM_CUDA_INCLUDE}/cuda.h")
    message(FATAL_ERROR "CUMEM_CUDA_INCLUDE is ${CUMEM_CUDA_INCLUDE}, which holds no cuda.h.")
  endif()
  set(cumem_cuda_include "${CUMEM_CUDA_INCLUDE}")
endif()

if(NOT cumem_cuda_include AND Python_Interpreter_FOUND)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "
import importlib.util, pathlib
spec = importlib.util.find_spec('nvidia')
for root in (spec.submodule_search_locations or []) if spec else []:
    for folder in ('cu13', 'cuda_runtime'):
        include = pathlib.Path(root, folder, 'include')
        if (include / 'cuda.h').is_file():
            print(include)
            raise SystemExit
"
    OUTPUT_VARIABLE cumem_cuda_include
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET)
endif()

if(NOT cumem_cuda_include AND EXISTS /usr/local/cuda/include/cuda.h)
  set(cumem_cuda_include /usr/local/cuda/include)
endif()

if(NOT cumem_cuda_include)
  find_package(CUDAToolkit QUIET)
  foreach(include IN LISTS CUDAToolkit_INCLUDE_DIRS)
    if(NOT cumem_cuda_include AND EXISTS "${include}/cuda.h")
      set(cumem_cuda_include "${include}")
    endif()
  endforeach()
endif()

if(NOT cumem_cuda_include)
  message(FATAL_ERROR
    "cuda.h was not found. cumem needs this one header to build, and no other part of CUDA. Either\n"
    "  pip install 'nvidia-cuda-runtime>=13.0,<14' into the Python that builds (now: ${Python_EXECUTABLE}), or\n"
    "  pass -DCUMEM_CUDA_INCLUDE=DIR, the directory that holds cuda.h"
    " (with pip: --config-settings=cmake.define.CUMEM_CUDA_INCLUDE=DIR).")
endif()
file(STRINGS "${cumem_cuda_include}/cuda.h" cumem_cuda_version REGEX "^#define CUDA_VERSION ")
string(REGEX REPLACE "[^0-9]" "" cumem_cuda_version "${cumem_cuda_version}")
message(STATUS "cuda.h: ${cumem_cuda_include} (CUDA_VERSION ${cumem_cuda_version})")
