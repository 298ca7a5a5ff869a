# `make demo` and `make test` set everything up in .venv and touch nothing outside this folder
# (prepared data goes to the user's cache folder, see docs/formats.md).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# Else pip compiles all modules, most of which nothing ever imports.
AS_NEEDED := --no-compile

# What tests start would else compile the package anew, each time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all lint format site notebooks kernels simulated-card gpu sanitize clean

demo: $(VENV)/installed
	$(BIN)/comera front lm/demo --seconds=30 --rates='[1.4]' --overwrite=true

test: $(VENV)/installed-dev $(VENV)/installed-peers
	$(BIN)/python -m pytest -n 2 -m "not slow"

# What CI runs: the tests that the above leaves out too. Their files make much once for all, and
# wait for processes that they start: hence one more process than there are cores.
test-all: $(VENV)/installed-dev $(VENV)/installed-peers
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# To be read from the disk: build/site/index.html.
site: $(VENV)/installed-dev
	$(BIN)/mkdocs build --quiet --strict

# Runs all notebooks, five minutes on two cores, and stores what they show.
notebooks: $(VENV)/installed-dev $(VENV)/installed-peers
	$(INSTALL) $(AS_NEEDED) plotly
	$(BIN)/python -m notebooks.store

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# All that shows about kernels without a GPU, of which `make test-all` looks at a part: each is
# compiled for Ampere, Hopper and Blackwell, and planted bugs are caught, one after the other.
kernels: $(VENV)/installed-dev $(VENV)/installed-peers
	COMERA_ALL_KERNELS=1 $(BIN)/python -m pytest -n 2 -m slow tests/kernels

# Tests that need a GPU, on one that is only pretended: see tests/simulated_card.
simulated-card: $(VENV)/installed-dev $(VENV)/installed-peers
	$(BIN)/python -m pytest -q -n 2 -p no:benchmark -p tests.simulated_card.plugin -m gpu

# On a machine with a GPU, in an environment that has the package and pytest:
#     make gpu GPU_PYTHON=python3
# In ten minutes: what is there, the fastest way of each operator, training steps, layers, tables and
# memory beside dense ones, all tests that need the GPU, memory errors and races of the kernels. One
# page, runs/gpu-DATE.md, and the same as JSON. A part that fails or takes too long is named there,
# and the others go on.
GPU_PYTHON ?= $(BIN)/python
GPU_SECONDS ?= 600

gpu:
	$(GPU_PYTHON) -m benchmarks.card --seconds $(GPU_SECONDS)

# Tests of the operators under compute-sanitizer, which looks at the kernels of the one under test:
# races in cuDNN are not ours, nor is how cuda-bindings asks the driver for what it may not have.
# Each tensor has an allocation of its own, so that what is written beside it is seen.
SANITIZER ?= compute-sanitizer
SANITIZER_SECONDS ?= 300
SANITIZED := contract:test_contract ttm:test_lookup feed_forward:test_feed_forward

sanitize:
	@if ! command -v $(SANITIZER) > /dev/null; then \
	echo "memcheck and racecheck are skipped: compute-sanitizer, part of the CUDA toolkit, is not" \
	"installed"; \
	exit 0; fi; \
	worst=0; for tool in memcheck racecheck; do for part in $(SANITIZED); do \
	kernels=$${part%%:*}; \
	echo "$$tool of the kernels $${kernels}_*:"; \
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout $(SANITIZER_SECONDS) $(SANITIZER) --tool $$tool \
	--report-api-errors no --kernel-regex kns=$${kernels}_ \
	--error-exitcode 9 --target-processes all \
	$(GPU_PYTHON) -m pytest -q -p no:benchmark -m gpu -k on_a_card tests/kernels/$${part##*:}.py; \
	status=$$?; \
	if [ $$status = 124 ]; then \
	echo "$$tool of $${kernels}_* did not end within $(SANITIZER_SECONDS) seconds"; fi; \
	if [ $$status != 0 ]; then worst=$$status; fi; \
	done; done; exit $$worst

clean:
	rm -rf $(VENV) runs build .pytest_cache .mypy_cache .ruff_cache

# torch comes first and alone, so that no other package's wider requirement picks another build.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "comera needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(AS_NEEDED) torch
	$(INSTALL) $(AS_NEEDED) -e '.[cli]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) $(AS_NEEDED) -e '.[dev]'
	touch $@

# What the tests compare with, at once or, where that fails, one by one: tests of a package that
# cannot be had are skipped, and it is tried again the next time. galore-torch comes without
# bitsandbytes, which the tests do not need. All is compiled here: Python warns of torchao's source
# then, and in tests warnings are errors.
PEERS := accelerate came-pytorch onnxruntime onnxscript opacus optuna peft pytorch-lightning sentence-transformers stable-baselines3 submitit tensorly-torch torchao transformers "--no-deps galore-torch"
AT_ONCE := $(filter-out "% %",$(PEERS))

$(VENV)/installed-peers: $(VENV)/installed-dev
	@all=yes; each() { for peer in "$$@"; do \
	$(INSTALL) $$peer || { all=no; echo "$$peer cannot be installed: its tests are skipped"; }; \
	done; }; \
	$(INSTALL) $(AT_ONCE) 2> /dev/null || each $(AT_ONCE); \
	each $(filter-out $(AT_ONCE),$(PEERS)); \
	if [ $$all = yes ]; then touch $@; fi
