# Daily work. Every target installs and builds what it needs, and may be repeated at no cost.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
JOBS ?= $(shell nproc)
# Of Python's tests, a gigabyte each; on two cores of a Zen 3 they take 8 minutes.
WORKERS ?= 2
BUILD := build/release
STAMPS := build/stamps
VENV := .venv
IN_VENV := $(VENV)/bin/python
CXX_FILES = $(shell git ls-files '*.c' '*.cc' '*.h' '*.cu' '*.cuh')

.PHONY: help setup test bench lint demo docs wheel sanitize test-arm test-transformers mutants clean

help:
	@echo "make setup     packages, virtual environment (.venv), Release build;"
	@echo "               then: $(IN_VENV) -m rarefy and $(BUILD)/src/cli/rarefy"
	@echo "make test      C++ and Python tests            make sanitize  C++ tests under ASan+UBSan and TSan"
	@echo "make demo      a real model, sparse and faster make bench     benchmarks (bench/)"
	@echo "make lint      formats, clang-tidy, ruff, links make clean    removes build/ and .venv/"
	@echo "               and the C++ tests with clang"
	@echo "make docs      pages and reference, into build/docs"
	@echo "make wheel     an sdist and one wheel for all, into dist/, tried on each Python that there is"
	@echo "make test-arm  C++ tests for AArch64 under qemu-user"
	@echo "make test-transformers  the integration's tests with older versions, 4.50 to 5.3"
	@echo "make mutants   small defects, one at a time, that the tests must notice: hours (tests/mutation)"

$(STAMPS)/packages: apt.txt
	./tools/install_packages.sh apt.txt
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/venv: requirements/dev.txt requirements/uv.txt $(STAMPS)/packages
	$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 10) or sys.exit(f"rarefy needs Python 3.10 or later; got {v}: make setup PYTHON=python3.12")'
	[ -x $(IN_VENV) ] || $(PYTHON) -m venv $(VENV)
	$(IN_VENV) -m pip install -q --disable-pip-version-check -r requirements/uv.txt
	$(VENV)/bin/uv pip install -q -p $(IN_VENV) -r requirements/dev.txt
	# The source tree itself is importable: no reinstall after a change.
	echo $(CURDIR)/python > $$($(IN_VENV) -c 'import site; print(site.getsitepackages()[0])')/rarefy.pth
	touch $@

$(BUILD)/build.ninja: $(STAMPS)/venv
	cmake --preset release -DRAREFY_BUILD_TORCH=ON -DRAREFY_ONNX=ON -DPython3_EXECUTABLE=$(CURDIR)/$(IN_VENV)

setup: $(BUILD)/build.ninja
	cmake --build $(BUILD) -j $(JOBS)

test: setup
	ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)
	$(IN_VENV) -m pytest -n $(WORKERS) --dist worksteal tests/python
	@$(BUILD)/tests/cpp/rarefy_tests --gtest_filter='FamiliesTest.*' --gtest_brief=1 | grep '^Not run here'

bench: setup
	cmake -DRAREFY_BUILD_BENCH=ON $(BUILD)
	cmake --build $(BUILD) -j $(JOBS) --target rarefy_peak
	$(IN_VENV) bench/run.py
	$(IN_VENV) bench/reached.py
	$(IN_VENV) bench/matrices.py

demo: setup
	$(IN_VENV) -m examples.minilm.run

lint: setup
	clang-format --dry-run -Werror $(CXX_FILES)
	grep -oE '$(CURDIR)/src/[^"]*\.cc' $(BUILD)/compile_commands.json | sort -u | xargs -P $(JOBS) -n 1 clang-tidy --quiet -p $(BUILD) --warnings-as-errors='*'
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(IN_VENV) tools/check_links.py
	cmake --preset clang
	cmake --build --preset clang -j $(JOBS)
	ctest --preset clang --output-on-failure -j $(JOBS)

sanitize: $(STAMPS)/packages
	for preset in asan tsan; do \
	  cmake --preset $$preset; \
	  cmake --build --preset $$preset -j $(JOBS); \
	  ctest --preset $$preset --output-on-failure -j $(JOBS); \
	done

docs: setup
	./tools/install_packages.sh apt-docs.txt
	$(VENV)/bin/uv pip install -q -p $(IN_VENV) -r requirements/docs.txt
	$(VENV)/bin/sphinx-build -q -E -W --keep-going -c docs/api docs build/docs

# Minutes on many cores, half an hour on two where nvcc builds the CUDA back end.
wheel: setup
	$(VENV)/bin/uv pip install -q -p $(IN_VENV) -r requirements/wheel.txt
	$(IN_VENV) tools/wheel.py

# AArch64 under qemu-user: 5 minutes to build, 5 to run.
test-arm: $(STAMPS)/packages
	./tools/install_packages.sh apt-arm.txt
	cmake --preset arm
	cmake --build --preset arm -j $(JOBS)
	ctest --preset arm --output-on-failure -j $(JOBS)

# Each version in an environment that sees .venv's packages behind its own: 2 minutes each. `make test` runs the newest.
test-transformers: setup
	for list in requirements/transformers-*.txt; do \
	  env=build/$$(basename $$list .txt); \
	  $(VENV)/bin/uv venv -q --clear -p $(IN_VENV) $$env; \
	  $(IN_VENV) -c 'import site; print(*site.getsitepackages())' > $$(echo $$env/lib/*/site-packages)/behind.pth; \
	  $(VENV)/bin/uv pip install -q --no-deps -p $$env/bin/python -r $$list; \
	  PYTHONPATH=$(CURDIR)/python $$env/bin/python -m pytest -q tests/python/test_transformers*.py; \
	done

# Goes on where an earlier run stopped. Not for CI: hours.
mutants: setup
	$(IN_VENV) tests/mutation/run.py --jobs $(JOBS)

clean:
	rm -rf build $(VENV) python/rarefy/lib
