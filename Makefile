# Each target works alone in a fresh clone; `make` alone lists them.
PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?= --numprocesses=auto
# One thread a test process: the processes share the cores, and bits depend on threads.
TEST_ENV = OMP_NUM_THREADS=1

VENV := .venv
BIN := $(VENV)/bin
BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt $(wildcard cpp/*)
INSTALLED := $(VENV)/lowtide-installed

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make .venv and install lowtide into it, editable

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): $(BUILT_FROM) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## Train ResNet-50 plain and in half of its memory; compare the losses
	$(BIN)/python examples/demo.py

test: $(INSTALLED) ## Run all tests (under 20 minutes on 2 cores)
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS) tests

lint: $(INSTALLED) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## Repair style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## Measure budgets and speed on small models (minutes; see benchmarks/)
	$(BIN)/python benchmarks/budget.py --quick

clean: ## Remove .venv and everything built
	rm -rf $(VENV) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis
