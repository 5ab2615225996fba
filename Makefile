# make demo and make test do all set-up themselves; they need Python 3.12 or 3.13 with pip, and a package index.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.12 python3.13 python3; do $$p -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
RELEASES := 0.16.1 0.17.1 0.18.2 0.19.0 0.19.2
WORKERS ?= 2
TILELANG ?=

# One thread a process: the tests run several processes, and megatron's CPU models are tiny.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# Hundreds of processes import the same files; each would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup releases demo test test-kernels test-thorough lint format typecheck check dist clean

help:
	@echo "make demo       train tiny models on the real megatron-core, without and with the patches"
	@echo "make test       run the tests (CPU)"
	@echo "make test-thorough  several processes on the releases that make test leaves out"
	@echo "make test-kernels   assemble every TileLang kernel with nvcc (no GPU needed)"
	@echo "make check      lint, types and tests"
	@echo "make dist       build the wheel and the sdist into dist/"
	@echo "make clean      remove what these commands made"

$(READY): pyproject.toml requirements/constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "Python 3.12 or 3.13 was not found; install it, or run make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt -e '.[dev]'
	@touch $@

setup: $(READY) releases

# The five releases that the patches are for, each in a folder of its own: tests put one on PYTHONPATH.
releases: $(RELEASES:%=.releases/%/.ready) .releases/packaging-24.2/.ready

.releases/packaging-%/.ready: | $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) packaging==$*
	@touch $@

.releases/%/.ready: | $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) megatron-core==$*
	@touch $@

demo: $(READY)
	$(PY) -m mcore_patches.cli demo

test: setup
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup --ignore-glob='*/ops/test_compile_*.py' -m 'not thorough' $(ARGS)

test-thorough: setup
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup -m thorough $(ARGS)

# The tests of a file in an xdist_group share two processes that compile; those of other files compile in their own.
# TILELANG=0.1.12 takes that release instead of the installed one.
test-kernels: $(READY) $(if $(TILELANG),.releases/tilelang-$(TILELANG)/.ready)
	@command -v nvcc > /dev/null || { echo "make test-kernels needs nvcc of the CUDA toolkit (12.8 or newer) on PATH" >&2; exit 1; }
	$(if $(TILELANG),PYTHONPATH=.releases/tilelang-$(TILELANG)) $(PY) -m pytest -n $(WORKERS) --dist loadgroup tests/ops/test_compile_*.py $(ARGS)

# With the tvm-ffi that it asks for; what else it needs is installed.
.releases/tilelang-%/.ready: | $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) tilelang==$*
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) \
		"$$($(PY) -c 'import importlib.metadata as m; d, = m.distributions(name="tilelang", path=["$(@D)"]); print(*[r for r in d.requires if r.startswith("apache-tvm-ffi")])')"
	@touch $@

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

typecheck: $(READY)
	$(VENV)/bin/mypy

check: lint typecheck test test-thorough test-kernels

dist: $(READY)
	$(PY) -m build

clean:
	rm -rf $(VENV) .releases build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
