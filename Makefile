# Everything lives in $(VENV) and build/; a second run starts at once. The two commands of the README are `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
CC ?= cc
FUZZ_SECONDS ?= 20
PYTEST_ARGS ?=
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -q
ROOT := $(CURDIR)
SETUP := pyproject.toml setup.py
C_SRC := $(sort $(shell find csrc -name '*.c'))
C_HDR := $(sort $(shell find csrc -name '*.h'))
C_TESTS := $(sort $(basename $(notdir $(wildcard tests/c/*.c))))
PY_SRC := $(sort $(shell find ds4 -name '*.py'))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build test test-fast test-isa test-neon fast-0 fast-1 bench demo lint format sanitize sanitize-quick asan-c tsan fuzz clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-17s %s\n", $$1, $$2}'

# ---- set-up: one stamp per step ----------------------------------------------------------------------------------------------------

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("ds4 needs Python 3.10 or newer, and $(PYTHON) is %d.%d: set PYTHON" % sys.version_info[:2] \
	  if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'setuptools>=77' 'cffi>=1.17'
	@touch $@

# Editable installs; where the one with the test extras is in place `demo` needs no other.
$(VENV)/.run: $(VENV)/.made $(SETUP)
	$(PIP) --no-build-isolation -e .
	@touch $@
$(VENV)/.test: $(VENV)/.made $(SETUP)
	$(PIP) --no-build-isolation -e '.[test]'
	@touch $@
$(VENV)/.dev: $(VENV)/.test
	$(PIP) --no-build-isolation -e '.[test,dev]'
	@touch $@
$(VENV)/.bench: $(VENV)/.test
	$(PIP) --no-build-isolation -e '.[test,bench]'
	@touch $@
RUN := $(if $(wildcard $(VENV)/.test),$(VENV)/.test,$(VENV)/.run)

build/.core: $(C_SRC) $(C_HDR) $(SETUP) | $(VENV)/.made
	$(PY) setup.py -q build_ext --inplace
	@touch $@
build/.core-test: $(C_SRC) $(C_HDR) $(SETUP) | $(VENV)/.made
	DS4_BUILD_TEST=only $(PY) setup.py -q build_ext --inplace
	@touch $@

# ---- daily work --------------------------------------------------------------------------------------------------------------------

build: $(VENV)/.test build/.core build/.core-test ## set up .venv and build the core, release and test build

test: build ## set up and run the whole test suite
	DS4_CORE=test $(PY) -m pytest $(PYTEST_ARGS) tests
	$(PY) -m pytest tests/test_tiny.py

test-fast: build ## the suite without its slow tests, in two halves side by side (under 90 s on 2 cores)
	@$(MAKE) --no-print-directory -j2 --output-sync=target fast-0 fast-1

# The contract with each kernel table that this processor has, ref included. Status 3: the core says that it is not on this processor.
HAS_ISA := from ds4.core import ffi, lib; s = lib.ds4_engine_new(b"llama", b"cpu", 1, ffi.new("ds4_engine **"), ffi.NULL); \
  raise SystemExit(3 if s == lib.DS4_EUNSUPPORTED else s and "the core makes no engine: status %d" % s)
test-isa: build ## the contract's tests with every kernel table of this processor forced in turn
	@set -e; ran=; for isa in ref scalar avx2 avx512 neon-plain neon-dot; do export DS4_ISA=$$isa DS4_CORE=test; \
	  has=0; $(PY) -c '$(HAS_ISA)' || has=$$?; \
	  case $$has in 0) ;; 3) echo "$$isa: not on this processor"; continue;; *) echo "$$isa: the probe failed, see above" >&2; exit 1;; esac; \
	  echo "$$isa:"; $(PY) -m pytest -m 'not slow' $(PYTEST_ARGS) $(patsubst %,tests/test_%.py,tiny contract chunks); ran="$$ran $$isa"; \
	done; [ -n "$$ran" ] || { echo "make test-isa: no kernel table was tested" >&2; exit 1; }; echo "tested:$$ran"

fast-0 fast-1:
	DS4_CORE=test $(PY) -m pytest -p no:cacheprovider -m 'not slow' $(PYTEST_ARGS) $$(ls tests/test_*.py | awk 'NR % 2 == $(@:fast-%=%)')

bench: build $(if $(PEERS),$(VENV)/.bench) ## measure, into build/bench.json; PEERS=1 also installs and measures other engines
	@mkdir -p build
	$(PY) -m pytest --benchmark-json=build/bench.json $(PYTEST_ARGS) benchmarks
	$(if $(PEERS),$(VENV)/bin/ds4 bench --vs llama.cpp --vs ik_llama.cpp --plot build/bench.png)

demo: $(RUN) build/.core ## set up, fetch SmolLM2-135M-Instruct, and see a long conversation compact itself
	$(VENV)/bin/ds4 demo

C_FILES = $(shell find csrc tests/c -name '*.c' -o -name '*.h')
lint: $(VENV)/.dev ## ruff, mypy, clang-format, and the C warnings as errors
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	for f in $(C_SRC) $(wildcard tests/c/*.c); do $(CC) $(C_FLAGS) -Wall -Wextra -Werror -fsyntax-only $$f || exit 1; done

format: $(VENV)/.dev ## rewrite Python and C in the project's format
	$(PY) -m ruff check --fix-only -q .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(C_FILES)

# ---- sanitizers --------------------------------------------------------------------------------------------------------------------

# The test core is built with ASan and UBSan into a copy of the package, and the suite runs on that copy. libstdc++ is loaded early because
# ASan has to find __cxa_throw before the first extension in C++ throws. Python itself leaks at exit, so leaks are looked for in tests/c only.
ASAN_LIB := build/asan/lib
ASAN_FLAGS := -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
ASAN_TEST = cd $(ASAN_LIB) && DS4_CORE=test PYTHONPATH=$(ROOT)/$(ASAN_LIB) PYTHONDONTWRITEBYTECODE=1 \
  LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
  $(abspath $(PY)) -m pytest -c $(ROOT)/pyproject.toml --rootdir $(ROOT) -p no:cacheprovider $(PYTEST_ARGS)

$(ASAN_LIB)/.made: $(C_SRC) $(C_HDR) $(PY_SRC) $(SETUP) $(wildcard models/*.toml) | $(VENV)/.test
	rm -rf $(ASAN_LIB)
	DS4_BUILD_TEST=only CFLAGS='$(ASAN_FLAGS)' $(PY) setup.py -q build --build-lib $(ASAN_LIB)
	@touch $@

sanitize: $(ASAN_LIB)/.made asan-c tsan ## ASan and UBSan on the whole suite, TSan on the C programs
	$(ASAN_TEST) -m 'not nosanitize' $(ROOT)/tests

# What is Python through and through costs the most under ASan and shows it the least.
PURE := agent anchors boundaries cli compaction deepseek_v4_agent deepseek_v4_chat deepseek_v4_compaction dsml ledger policy span spill store \
  summary tail tools transcript whole
sanitize-quick: $(ASAN_LIB)/.made asan-c tsan ## the part of it that CI runs
	$(ASAN_TEST) -m 'not nosanitize and not slow and not model' $(PURE:%=--ignore-glob='$(ROOT)/tests/test_%*.py') $(ROOT)/tests

# Programs without Python: build/<sanitizer>-c/<name>. Full debug information would take minutes to compile with ASan, -g1 gives lines.
C_FLAGS := -std=gnu11 -O1 -ffp-contract=off -fno-math-errno -pthread -Icsrc -DDS4_TEST
define c_programs
build/$(1)-c/%.o: %.c $$(C_HDR) $$(wildcard tests/c/*.h)
	@mkdir -p $$(@D)
	@echo "$(1): $$<"
	@$(or $(3),$$(CC)) $$(C_FLAGS) $(2) -c $$< -o $$@
build/$(1)-c/%: build/$(1)-c/tests/c/%.o $$(C_SRC:%.c=build/$(1)-c/%.o)
	@$(or $(3),$$(CC)) $(2) -pthread $$^ -lm -o $$@
endef
$(eval $(call c_programs,asan,$(ASAN_FLAGS)))
$(eval $(call c_programs,tsan,-g1 -fsanitize=thread))
.SECONDARY:

# TSan's shadow memory needs the address space where older kernels put it.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)
asan-c tsan:
	@$(MAKE) --no-print-directory -j$(JOBS) $(C_TESTS:%=build/$(@:-c=)-c/%)
	@for t in $(C_TESTS); do echo "$(@:-c=): $$t"; TSAN_OPTIONS=halt_on_error=1 $(NO_ASLR) build/$(@:-c=)-c/$$t || exit 1; done

# The C programs for 64-bit ARM, run by qemu-user: on a processor that has everything, and the kernels also on one without dot products.
ARM_CC ?= aarch64-linux-gnu-gcc
ARM_QEMU ?= qemu-aarch64
$(eval $(call c_programs,neon,-static -Wall -Wextra -Werror,$(ARM_CC)))
test-neon: ## cross-compile the core for 64-bit ARM and run the C programs under qemu-user
	@for tool in $(ARM_CC) $(ARM_QEMU); do command -v $$tool >/dev/null || { echo "make test-neon needs $$tool, which was not found: install it" \
	  "(Debian: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user), then try again" >&2; exit 1; }; done
	@$(MAKE) --no-print-directory -j$(JOBS) $(C_TESTS:%=build/neon-c/%)
	@for t in $(C_TESTS); do echo "neon: $$t"; $(ARM_QEMU) -cpu max build/neon-c/$$t || exit 1; done
	@echo "neon: kernels on a Cortex-A57"; $(ARM_QEMU) -cpu cortex-a57 build/neon-c/kernels

fuzz: build ## every target in fuzz/ for FUZZ_SECONDS (20)
	@set -e; for f in $(filter-out fuzz/common.py,$(wildcard fuzz/*.py)); do echo "$$f"; DS4_CORE=test FUZZ_SECONDS=$(FUZZ_SECONDS) $(PY) $$f; done

clean: ## back to a fresh checkout: removes build products, caches and .venv
	rm -rf build dist *.egg-info ds4/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks $(VENV)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
