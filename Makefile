# `make demo` and `make test` set up what they need: Python 3.11 and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PYTHONPATH := src
# Processes that tests start read the bytecode of others.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test check format lint types tests soak gpu-test bench docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; a few minutes) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $(READY)

demo: $(READY)
	$(BIN)/lowtide demo

test: lint
	@$(MAKE) --no-print-directory --jobs 2 types tests

check: format test

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/basedpyright --level error

tests: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

soak: $(READY)
	LOWTIDE_SOAK=1 $(BIN)/python -m pytest

# No installation: runs from the source tree with whatever Python has torch and a GPU.
gpu-test:
	$(PYTHON) -m pytest -m gpu

bench: $(READY)
	$(BIN)/lowtide bench --all

docs: $(READY)
	$(BIN)/mkdocs build --strict --quiet
	@echo "docs are in site/"

clean:
	rm -rf $(VENV) site lowtide-demo
