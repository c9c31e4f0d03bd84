# make demo      train two models within a budget each, beside plain PyTorch, and print the table
# make test      everything a change has to pass
# make test-all  the same with slow tests
# make docs      build the documentation as a site in build/docs
# make format    put the source into its standard form
#
# Each sets itself up in .venv first, from Python 3.11 or newer and pip, and again only when pyproject.toml or
# constraints.txt has changed. Another interpreter: make test PYTHON=/path/to/python

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint docs format clean
.DELETE_ON_ERROR:

# A python3.11 may be on the path and not run (pyenv's shims), so each candidate is asked.
PYTHON ?= $(shell for name in python3.11 python3; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)
BIN := .venv/bin
# pip leaves compiling to the first import, which has to keep it: the tests start Python a few hundred times.
unexport PYTHONDONTWRITEBYTECODE
READY := .venv/.ready
BUILT := .venv/.built

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -5

# Without Debian's python3-venv there is no pip to put into the environment: the one outside puts it there.
$(READY): pyproject.toml constraints.txt
	@if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "Elbowroom needs Python 3.11 or newer, and '$(PYTHON)' is not that." \
			"Install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	rm -f $(READY)
	"$(PYTHON)" -m venv .venv || { "$(PYTHON)" -m venv --clear --without-pip .venv && \
		"$(PYTHON)" -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --no-build-isolation --editable '.[models,pictures,tuning,integrations,docs,dev]'
	touch $(READY)

# In machine code: the planner's loops, and the extension that counts memory and watches ops.
LOOPS := $(shell grep -rl --include='*.py' '_numba_loops import' src)
NATIVE := $(wildcard src/elbowroom/native/*.cpp src/elbowroom/native/*.h)
$(BUILT): $(READY) $(LOOPS) $(NATIVE)
	$(BIN)/elbowroom build && touch $(BUILT)

demo: $(BUILT)
	$(BIN)/elbowroom demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Idle OpenMP threads spin by default, which takes the cores from whoever has work: here they sleep.
# Lint runs beside the compiler. The tests run, and their summary comes last, whatever lint has found. Files are spread over up to four cores, in the
# order of tests/conftest.py; a test that kills its worker ends it, where xdist would wait for ever.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
test-all: PYTEST += --slow
test test-all: export OMP_WAIT_POLICY ?= passive
test test-all: $(READY)
	@failed=0; $(MAKE) --jobs 2 --keep-going --output-sync=target --no-print-directory lint $(BUILT) || failed=1; \
	echo "$(PYTEST)"; $(PYTEST) || failed=1; exit $$failed

# From the files alone, without a network. A warning fails it: a broken link, a page that nothing leads to.
docs: $(READY)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/docs
	@echo "the site is at build/docs/index.html"

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist src/*.egg-info
