# Every target works in a fresh clone with only Python and make: `make quickstart`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Three workers, because many tests wait for processes; one thread each. A worker gets whole files,
# so that their fixtures are built once, in the order of tests/conftest.py.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

SEED ?= 1
MINUTES ?= 60

.PHONY: help quickstart test test-all torture lint docs demo-extra clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

quickstart: $(VENV)/installed  ## make synthetic videos, train a small model on them, test it
	$(BIN)/python tools/quickstart.py

test: $(VENV)/installed-test  ## run the fast tests
	$(PYTEST)

test-all: $(VENV)/installed-test $(VENV)/installed-demo  ## run all tests
	$(PYTEST) -m "slow or not slow"

torture: $(VENV)/installed-test  ## train under random faults (SEED=1 MINUTES=60)
	$(BIN)/python -m tests.torture --seed $(SEED) --minutes $(MINUTES)

lint: $(VENV)/installed-test  ## check style (ruff), types (mypy) and imports (import-linter)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/installed-docs  ## build the documentation site in site/
	$(BIN)/python docs/config_reference.py --check
	$(BIN)/mkdocs build --strict

demo-extra: $(VENV)/installed-demo  ## install what `slowfast-lara demo` needs

clean:  ## remove the virtual environment
	rm -rf $(VENV)

# `pip install .` without -e replaces the editable install by a copy, which edits do not change.
ifneq (,$(wildcard $(VENV)/lib/python*/site-packages/slowfast_lara/__init__.py))
.PHONY: $(VENV)/installed
endif

# The marker files are written last, so that an interrupted install is repeated.
$(VENV)/installed: setup.py pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(INSTALL) -e ".[test,lint]"
	touch $@

$(VENV)/installed-demo: $(VENV)/installed
	$(INSTALL) -e ".[demo]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(INSTALL) -e ".[docs]"
	touch $@
