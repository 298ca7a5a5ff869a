# `make demo` and `make test` set everything up in .venv and touch nothing outside this folder
# (prepared data goes to the user's cache folder, see README).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint format gpu clean

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

# On a machine with a GPU, in an environment that has the package and pytest:
#     make gpu GPU_PYTHON=python3
# All tests that need the GPU, then steps of the paper's encoders, eager and as CUDA graphs.
GPU_PYTHON ?= $(BIN)/python
GPU_TABLE := runs/gpu-$(shell date -u +%Y-%m-%d-%H%M).txt

gpu:
	mkdir -p runs
	{ $(GPU_PYTHON) -m pytest -q -m gpu && \
	$(GPU_PYTHON) -m comera.recipes.cli bench step --device cuda --batch 32 64 128 && \
	$(GPU_PYTHON) -m comera.recipes.cli bench memory --device cuda --batch 1 32; } \
	> $(GPU_TABLE) 2>&1; status=$$?; cat $(GPU_TABLE); exit $$status

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
