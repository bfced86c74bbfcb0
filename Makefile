# make run         serve the embedded model on PORT (8080)
# make test        build, C++ tests, Python tests
# make test-triton Triton kernels in Triton's interpreter
# make text-generation-client   an environment for that client, which its test then uses
# make test-browser  a headless Chromium reads streams and uses the pages (BROWSER names one; else npm fetches it)
# make test-races  CUDA kernels in the emulator, watched for races between their threads
#                  (notes what passed in build/watched.txt, which .ci/run's make test leaves out)
# make lint        ruff, mypy, clang-format, and whether wheels' compiler, clang, takes the kernels
# make test-asan   C++ tests under the address and undefined-behaviour sanitizers
# make test-tsan   C++ tests under the thread sanitizer
# make test-arm    the same for aarch64 under qemu (apt install g++-aarch64-linux-gnu qemu-user)
# make bench       kernels, engine and front end beside the machine's roofs (a quiet machine, 15 minutes)
# make fuzz        random configurations for FUZZ_SECONDS (600), at least FUZZ_CASES (200000);
#                  then FUZZ_REQUESTS (100000) mutated requests to every route, FUZZ_GGUF (10000) files,
#                  and FUZZ_FILES (10000) checkpoints of each format
# make bench-peers-quick  install other engines (once, about 20 minutes each at most), then compare
#                  the 160M shape with them in under 30 minutes; run again, it goes on
# bench/gpu_suite.sh OUT  the same on a GPU, with the GPU tests (9 minutes)
# make cuda        compile the CUDA kernels for sm_90a, check their registers and waits (needs nvcc)
# make cuda-all    the same for every GPU from sm_80 on, into lmi_core/
# make cuda-wheel  the same as the wheel lmi-cuda, in dist/; lmi-core's own wheel goes without
# make cuda-resources   after a change that is meant: csrc/cuda/resources.txt anew
# make cuda-latency   what the kernels keep under way, and which are worse than the bars of latency.py
# make cuda-loops  what the kernels' loops issue (KERNEL=linear_packed: those with that name)
# make wheels      wheels (manylinux_2_28) and an sdist of the last commit, in dist/, for the Pythons
#                  of 3.11 to 3.14 that are here (PYTHONS names others)
# make clean       remove what was built, but not the virtual environment
PORT ?= 8080
PYTHON ?= python3
# PyTorch is the tests' oracle, and nothing else needs it.
TORCH ?= torch==2.13.0
# Releases that the tests have met; what users install is whatever is newest.
CONSTRAINTS ?= --constraint tests/constraints.txt

VENV := .venv
BIN := $(VENV)/bin
# Built with the environment's own cmake and ninja where the system has none.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# An environment that keeps Python from writing bytecode has each process compile anew what it imports:
# of the oracles' imports, two thirds of the time.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := setup.py pyproject.toml CMakeLists.txt $(shell find csrc -type f)
FORMATTED := $(shell find csrc tests/cpp tests/cuda_emulator -name '*.h' -o -name '*.inc' -o -name '*.cpp' \
               -o -name '*.cu' -o -name '*.cuh')
# Whole suites take every core, also while a test waits; a test file of one's own is quicker without
# workers.
PYTEST := $(BIN)/python -m pytest -n $(shell expr $$(nproc) + 1) --dist worksteal
# Kernels that are interpreted or watched never wait: a worker more would import everything once more.
PYTEST_KERNELS := $(BIN)/python -m pytest -n $(shell nproc) --dist worksteal
# What setuptools says of every editable installation, pip repeats at length since 26.
PIP_EDITABLE := PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install
CMAKE := cmake -S . -GNinja -DLMI_PYTHON=OFF
# The thread sanitizer of older compilers can't stand much address randomisation.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

BROWSER ?= build/browser/chromium
FUZZ_SECONDS ?= 600
FUZZ_CASES ?= 200000
FUZZ_REQUESTS ?= 100000
FUZZ_FILES ?= 10000
FUZZ_GGUF ?= 10000

.PHONY: run test test-arm test-triton test-races build-races test-browser text-generation-client bench bench-peers-quick fuzz lint test-asan test-tsan \
	cuda cuda-library cuda-all cuda-wheel cuda-resources cuda-latency cuda-loops wheels build clean check-tools
.DELETE_ON_ERROR:

run: $(VENV)/.installed
	@echo 'lmi is $(CURDIR)/$(BIN)/lmi; in another terminal: source "$(CURDIR)/$(BIN)/activate"'
	$(BIN)/lmi serve --port $(PORT)

test: build
	build/native/lmi_tests
	$(PYTEST) --durations=30

test-triton: build
	TRITON_INTERPRET=1 $(PYTEST_KERNELS) -k 'triton and not cuda' tests/ops \
	  tests/runners/device/test_torch_runner.py tests/runners/device/test_device_dtypes.py \
	  tests/runners/device/test_torch_invariance.py

build-races: build
	cmake --build build/native --target lmi_cuda_races

# What these show of the runner needs no watching: their kernels are other tests'.
NO_KERNELS := said or says or notices or closing or preempted or shapes_that or shapes_to \
  or what_follows or heads_over_one or ranks_give_the_same

test-races: build-races
	LMI_TEST_RACES=1 $(PYTEST_KERNELS) tests/runners/device/test_cuda_runner.py \
	  tests/runners/device/test_cuda_runner_ahead.py \
	  tests/runners/device/test_cuda_ranks.py tests/ops \
	  -k '((native and cpu) or races or traffic or cuda_runner or cuda_ranks) and not ($(NO_KERNELS))'

text-generation-client:
	$(PYTHON) -m venv build/$@
	build/$@/bin/pip install --quiet text-generation==0.7.0 requests

test-browser: build $(BROWSER)
	LMI_BROWSER=$(abspath $(BROWSER)) $(BIN)/python -m pytest tests/server/http/test_browser.py tests/server/http/test_pages.py

build/browser/chromium:
	mkdir -p build/browser
	cd build/browser && npm pack --silent @sparticuz/chromium@147.0.0 && tar xzf *.tgz
	cd build/browser && node -e 'const fs = require("fs"), zlib = require("zlib");'\
	'const packed = fs.readFileSync("package/bin/chromium.br");'\
	'fs.writeFileSync("unpacked", zlib.brotliDecompressSync(packed), {mode: 0o755})'
	mv build/browser/unpacked $@
	rm -r build/browser/package build/browser/*.tgz

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(BIN)/clang-tidy --quiet --checks=-*,misc-unused-alias-decls csrc/cpu/isa/scalar.cpp \
	  csrc/cpu/isa/avx2.cpp -- -std=c++20 -Icsrc -mavx2 -mfma -mf16c

test-asan: $(VENV)/.installed-build
	$(CMAKE) -B build/asan -DLMI_SANITIZE=address,undefined
	cmake --build build/asan --target lmi_tests
	build/asan/lmi_tests

# Without what one thread does alone, at length.
test-tsan: $(VENV)/.installed-build
	$(CMAKE) -B build/tsan -DLMI_SANITIZE=thread
	cmake --build build/tsan --target lmi_tests
	$(NO_ASLR) build/tsan/lmi_tests -amx_ -random_history -a_row_the_same_bits -of_all_levels

test-arm: $(VENV)/.installed-test
	tests/arm/tests.sh

wheels:
	server/deploy/wheels.sh $(PYTHONS)

bench: $(VENV)/.installed-test
	$(BIN)/python -m bench.kernels.linear
	$(BIN)/python -m bench.kernels.attention
	$(BIN)/python -m bench.engine --shape 160m
	$(BIN)/python -m bench.startup
	$(BIN)/python -m bench.front_end

fuzz: build
	$(BIN)/python -m tests.config.fuzz --seconds $(FUZZ_SECONDS) --at-least $(FUZZ_CASES)
	$(BIN)/python -m tests.server.fuzz --requests $(FUZZ_REQUESTS)
	$(BIN)/python -m tests.weights.gguf_fuzz --files $(FUZZ_GGUF)
	$(BIN)/python -m tests.weights.checkpoint_fuzz --files $(FUZZ_FILES)

bench-peers-quick: $(VENV)/.installed
	$(BIN)/python -m bench.peers install
	$(BIN)/python -m bench.peers run --shape 160m --minutes 25

# The compiler works while packages are unpacked, of which Triton's has the disassembler.
cuda-library: $(VENV)/.installed-build
	$(CMAKE) -B build/cuda -DLMI_CUDA=ON
	cmake --build build/cuda --target lmi_cuda

cuda: cuda-library $(VENV)/.installed-test
	$(BIN)/python tests/machine_code/resources.py check build/cuda

cuda-resources: cuda-library $(VENV)/.installed-test
	$(BIN)/python tests/machine_code/resources.py write build/cuda

cuda-latency: cuda
	$(BIN)/python tests/machine_code/resources.py report build/cuda '$(KERNEL)'

cuda-loops: cuda
	$(BIN)/python tests/machine_code/loops.py build/cuda '$(KERNEL)'

cuda-all: $(VENV)/.installed-test
	$(CMAKE) -B build/cuda-all -DLMI_CUDA=ON \
	  '-DCMAKE_CUDA_ARCHITECTURES=80-real;89-real;90a-real;90'
	cmake --build build/cuda-all --target lmi_cuda
	$(BIN)/python tests/machine_code/resources.py spills build/cuda-all
	cp build/cuda-all/liblmi_cuda.so lmi_core/

cuda-wheel: cuda-all
	$(BIN)/python server/deploy/cuda_wheel.py build/cuda-all/liblmi_cuda.so dist

# What developers use: incremental, and with the C++ tests.
build: $(VENV)/.installed-test
	$(BIN)/python setup.py --quiet build_ext --inplace
	cmake --build build/native --target lmi_tests lmi_cuda_emulator
	touch $(VENV)/.installed

# What users need: kernels for this processor alone (`make build` adds the others), no torch, no build tools left behind, no bytecode of modules never imported.
$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	@echo 'Fetching packages and compiling: about two minutes on two cores, without a word'
	CMAKE_ARGS="-DLMI_LEVELS=own $$CMAKE_ARGS" $(PIP_EDITABLE) --quiet --no-compile -e .
	find $(VENV) -name __pycache__ -prune -exec rm -r {} +
	touch $@

# The link is for mypy, which doesn't follow the import hooks of editable installs. Of 20,000 modules
# some 4,000 are imported, which compiles them.
$(VENV)/.installed-test: pyproject.toml tests/constraints.txt $(VENV)/.installed-build
	$(BIN)/python -m pip install --quiet --no-compile $(CONSTRAINTS) '$(TORCH)'
	$(PIP_EDITABLE) --quiet --no-compile --no-build-isolation $(CONSTRAINTS) -e '.[test,lint]'
	ln -sfn "$(CURDIR)/server" "$$($(BIN)/python -c 'import sysconfig; \
	  print(sysconfig.get_path("purelib"))')/lmi_server"
	touch $@ $(VENV)/.installed

$(VENV)/.installed-build: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile $(CONSTRAINTS) 'setuptools>=77' 'pybind11>=2.12' 'cmake>=3.22' ninja
	touch $@

# Python 3.11's environments bring setuptools, which nothing here uses, and a pip that takes three
# times as long to find what goes together.
$(BIN)/python: | check-tools
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip uninstall --quiet --yes setuptools 2>/dev/null
	$(BIN)/python -m pip install --quiet --no-compile --upgrade pip || true

check-tools:
	@command -v $(PYTHON) >/dev/null || { echo 'error: $(PYTHON) not found: apt install python3'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  'error: $(PYTHON) is older than 3.11: apt install python3.11, then make PYTHON=python3.11'; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo \
	  'error: $(PYTHON) has no ensurepip: apt install python3-venv'; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; \
	  sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || { echo \
	  'error: Python.h not found: apt install python3-dev'; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo 'error: no C++ compiler: apt install g++'; exit 1; }

clean:
	rm -rf build dist *.egg-info lmi_core/_native.*.so .pytest_cache .mypy_cache .ruff_cache
	rm -f $(VENV)/.installed $(VENV)/.installed-test $(VENV)/.installed-build
