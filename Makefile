# Everything runs from a fresh clone with only Python and make: `make quickstart`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Three test files at a time, since many tests wait for processes; whole files so that what they
# share is made once, in the order of tests/conftest.py; a thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

SEED ?= 1
MINUTES ?= 60

.PHONY: help quickstart test test-all torture lint clean

help:  ## what there is to make (this list)
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

quickstart: $(VENV)/installed  ## make videos, train a small model on them, test it
	$(BIN)/python tools/quickstart.py

test: $(VENV)/installed-test  ## the tests that take seconds
	$(PYTEST)

test-all: $(VENV)/installed-demo  ## all tests
	$(PYTEST) -m "slow or not slow"

torture: $(VENV)/installed-test  ## an hour of random faults (SEED=1 MINUTES=60)
	$(BIN)/python -m tests.torture --seed $(SEED) --minutes $(MINUTES)

lint: $(VENV)/installed-test  ## style (ruff) and types (mypy)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove what was installed
	rm -rf $(VENV)

# The marker files are written last: an interrupted install is done again.
$(VENV)/installed: setup.py pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(INSTALL) -e ".[test,lint]"
	touch $@

$(VENV)/installed-demo: $(VENV)/installed-test
	$(INSTALL) -e ".[demo]"
	touch $@
