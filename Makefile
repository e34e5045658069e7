# Everything that a person or CI does here. `make help` lists it. A target makes what it needs in .venv and build/;
# Python 3.10+ and a C++ compiler are enough. A second run repeats only what its inputs ask for.
PYTHON ?= python3
JOBS ?= 2
WERROR ?= OFF

# Without a GPU the exact version that has a CPU build; an open range would fetch gigabytes of CUDA libraries.
HAS_GPU := $(wildcard /dev/nvidia0)$(shell command -v nvidia-smi)
TORCH ?= $(if $(HAS_GPU),torch>=2.11,torch==2.13.0)
TORCH_VERSIONS ?= 2.11.0 2.12.1 2.13.0 2.14.1

BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
STAMPS := .venv/stamps

CXX_HEADERS := $(shell find csrc tests/cpp -name '*.h')
CXX_SOURCES := $(shell find csrc tests/cpp -name '*.cpp')
CORE_SOURCES := $(filter csrc/%,$(CXX_SOURCES))
BUILD_FILES := CMakeLists.txt $(wildcard cmake/*) pyproject.toml

# Address randomisation beyond what the thread sanitizer can map makes it abort; switch it off where that is allowed.
NO_ASLR = $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)

.DELETE_ON_ERROR:
.PHONY: help demo test test-torch-versions test-cpp test-gpu sanitize sanitize-address sanitize-thread lint tidy format types wheel check-wheel clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(STAMPS)/extension $(STAMPS)/torch ## sleep and wake a model, on a GPU if there is one
	$(BIN)/cumem demo

test: $(STAMPS)/extension $(STAMPS)/torch $(STAMPS)/test ## all Python tests that need no GPU
	PYTEST_TIMEOUT=120 $(BIN)/python -m pytest -n $(JOBS) --ignore=tests/gpu tests

# Not in CI: each release brings several gigabytes of CUDA libraries, without which torch does not load.
test-torch-versions: $(TORCH_VERSIONS:%=build/torch-%/ok) ## what each release of torch has to keep; no GPU needed
	for release in $(TORCH_VERSIONS); do \
	    build/torch-$$release/bin/python docs/torch_names.py --record && \
	    PYTEST_TIMEOUT=120 build/torch-$$release/bin/python -m pytest -m torch_versions tests/unit || exit 1; \
	done

# The release itself (=== leaves local versions, those without CUDA, aside), and cumem and pytest from .venv.
build/torch-%/ok: | $(STAMPS)/test
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --quiet --disable-pip-version-check install "torch===$*"
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	    >"$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cumem-tools.pth"
	@touch $@

test-cpp: $(STAMPS)/venv ## the C++ tests
	$(call ctest,cpp)

test-gpu: ## the GPU tests with PYTHON as it is: fetches nothing, needs torch, pytest, scikit-build-core, pybind11
	$(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available() and 'torch sees no CUDA device')"
	rm -rf build/site
	$(PYTHON) -m pip install --no-build-isolation --no-deps --no-index --target build/site .
	cd build/site && PYTHONPATH=$(CURDIR)/build/site $(PYTHON) -m pytest -c ../../pyproject.toml ../../tests/gpu

sanitize: sanitize-address sanitize-thread ## the C++ tests under the address, undefined and thread sanitizers

sanitize-address: $(STAMPS)/venv
	$(call ctest,asan,address;undefined,env UBSAN_OPTIONS=print_stacktrace=1)

sanitize-thread: $(STAMPS)/venv
	$(call ctest,tsan,thread,$(NO_ASLR))

lint: $(STAMPS)/dev ## ruff, clang-format, clang-tidy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_HEADERS) $(CXX_SOURCES)
	$(MAKE) --no-print-directory -j $(JOBS) tidy

# A stamp for each file: only what changed is looked at again.
tidy: $(CORE_SOURCES:%=build/tidy/%.ok)

build/tidy/%.ok: % $(CXX_HEADERS) .clang-tidy | $(STAMPS)/extension $(STAMPS)/dev
	$(BIN)/clang-tidy --quiet -p build/extension $<
	@mkdir -p $(@D) && touch $@

format: $(STAMPS)/dev ## rewrites Python and C++ to the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_HEADERS) $(CXX_SOURCES)

types: $(STAMPS)/extension $(STAMPS)/torch $(STAMPS)/dev $(STAMPS)/test ## mypy, and the stub of the compiled module against the module
	$(BIN)/python -m mypy
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml --allowlist .stubtest-allow cumem._core

wheel: $(STAMPS)/venv ## dist/cumem-*.whl, built in isolation as a user's pip would
	rm -rf dist
	$(PIP) wheel --no-deps --wheel-dir dist .

check-wheel: wheel ## the wheel works in a venv of its own, without torch
	rm -rf build/wheel-venv
	$(BIN)/python -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip --quiet --disable-pip-version-check install dist/*.whl
	cd build/wheel-venv && bin/python -c "import cumem, cumem._core, sys; assert 'torch' not in sys.modules; print(cumem.__file__)"
	build/wheel-venv/bin/cumem --help >/dev/null

clean: ## removes all that make made
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find cumem tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# --- what the targets stand on ---

# $(call ctest,FOLDER,SANITIZERS,WRAPPER): builds the C++ tests in build/FOLDER and runs them.
define ctest
$(BIN)/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCUMEM_WERROR=$(WERROR) "-DCUMEM_SANITIZE=$(2)"
	$(BIN)/cmake --build build/$(1) -j $(JOBS)
	cd build/$(1) && $(3) $(CURDIR)/$(BIN)/ctest --output-on-failure --no-tests=error -j $(JOBS)
endef

$(STAMPS)/venv: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'cumem needs Python 3.10 or newer, this is ' + sys.version)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --upgrade "pip>=25.1"
	$(PIP) install --group build
	@mkdir -p $(@D) && touch $@

# Editable: Python files are used where they lie; the compiled module is built again when its inputs change.
$(STAMPS)/extension: $(STAMPS)/venv $(CXX_HEADERS) $(CORE_SOURCES) $(BUILD_FILES)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install --no-build-isolation --editable . \
	    --config-settings=build-dir=build/extension --config-settings=cmake.define.CUMEM_WERROR=$(WERROR)
	@touch $@

$(STAMPS)/torch: | $(STAMPS)/venv
	$(PIP) install "$(TORCH)"
	@touch $@

# cumem is there already: these add the packages of its extras and build nothing.
$(STAMPS)/test: pyproject.toml | $(STAMPS)/extension
	$(PIP) install "cumem[test,plot]"
	@touch $@

$(STAMPS)/dev: pyproject.toml | $(STAMPS)/extension
	$(PIP) install "cumem[dev,plot]"
	@touch $@
