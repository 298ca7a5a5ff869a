# `make demo` and `make test` set everything up in .venv and touch nothing outside this folder
# (prepared data goes to the user's cache folder, see README).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint format clean

demo: $(VENV)/installed
	$(BIN)/comera train configs/quickstart.yaml --overwrite=true
	$(BIN)/comera report runs/quickstart

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache

# torch comes first and alone, so that no other package's wider requirement picks another build.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "comera needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) -e '.[dev]'
	touch $@
