# Everything runs from a fresh clone with only Python and make: `make quickstart`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: quickstart test test-all lint clean

quickstart: $(VENV)/installed
	$(BIN)/python tools/quickstart.py

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -q

test-all: $(VENV)/installed-test
	$(BIN)/python -m pytest -q -m "slow or not slow"

lint: $(VENV)/installed-test
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV)

# The marker files are written last: an interrupted install is done again.
$(VENV)/installed: setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(INSTALL) -e ".[test,lint]"
	touch $@
