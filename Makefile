# hotrec: make help

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
# cpu, cuda, or auto: cuda where nvidia-smi answers.
DEVICE ?= auto
# The interpreter to make the environment with; empty: the first that works of 3.12, 3.11, 3.13.
PYTHON ?=
# One more package index, for torch's CPU build; see requirements/README.md.
TORCH_INDEX ?=
# More arguments for pytest, e.g. make test ARGS="-k partition -x".
ARGS ?=
export PYTHON TORCH_INDEX

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(DEVICE)
INSTALLED_DEV := $(VENV)/.installed-$(DEVICE)-dev
PINS := $(wildcard requirements/*.lock) requirements/make_venv.sh pyproject.toml

# One thread per process: the tests and the quickstart start several ranks on few cores.
export OMP_NUM_THREADS ?= 1

# Fast tests first: a typo is told in seconds, before ranks are started.
FAST_TESTS := $(wildcard tests/policy tests/unit tests/config)
OTHER_TESTS := $(filter-out $(FAST_TESTS) tests/data tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))

.PHONY: help install quickstart test lint format bench clean

help: ## Show this text.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(INSTALLED): $(PINS)
	requirements/make_venv.sh $(VENV) $(DEVICE)
	@rm -f $(VENV)/.installed-*
	@touch $@

$(INSTALLED_DEV): $(PINS)
	requirements/make_venv.sh $(VENV) $(DEVICE) dev
	@rm -f $(VENV)/.installed-*
	@touch $(INSTALLED) $@

install: $(INSTALLED) ## Make .venv with the pinned set and hotrec in it.

quickstart: $(INSTALLED) ## Install, then train a DLRM on a real click log with two workers.
	launch/quickstart.sh $(BIN)

test: $(INSTALLED_DEV) ## Install what the tests need, then run the whole suite.
	$(BIN)/python -m pytest $(FAST_TESTS) $(OTHER_TESTS) --durations=10 $(ARGS)

lint: $(INSTALLED_DEV) ## Run ruff and mypy.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED_DEV) ## Let ruff mend what it can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## Compare hot/cold with TorchRec's own plans, interleaved in one run.
	$(BIN)/hotrec bench

clean: ## Remove the environment and the caches; data and runs stay.
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
