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
# Another torch than the pinned one, by the name of its lock: 2.11 for requirements/torch-2.11.lock.
TORCH ?=
# More arguments for pytest, e.g. make test ARGS="-k partition -x".
ARGS ?=
export PYTHON TORCH TORCH_INDEX

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(DEVICE)$(addprefix -torch-,$(TORCH))
INSTALLED_TEST := $(INSTALLED)-test
INSTALLED_DEV := $(INSTALLED)-dev
INSTALLED_DOCS := $(INSTALLED)-docs
PINS := $(wildcard requirements/*.lock) requirements/make_venv.sh pyproject.toml

# One thread per process: the tests and the quickstart start several ranks on few cores.
export OMP_NUM_THREADS ?= 1

# Files of tests side by side; 0 for one after the other. They often wait: three keep two cores busy.
# What has limits of time takes two, in make test-all.
JOBS ?= 3
# What make test runs: that hotrec trains the unsplit model, its modules, and the commands on two ranks.
# Another choice, e.g. make test TESTS=tests/unit/planner, leaves no slow ones out.
FAST_TESTS := tests/exact tests/e2e/test_chain.py tests/unit
ifndef TESTS
TESTS := $(FAST_TESTS)
PICKED := -m "not slow"
endif
# What make test-all runs, long files before the many short ones, so that no worker is left alone with
# one. What is about the code itself is in make lint.
LONG_TESTS := tests/stand_in tests/benchmarks tests/distributed tests/faults tests/exact
ALL_TESTS := $(LONG_TESTS) $(filter-out $(LONG_TESTS) tests/policy tests/data tests/__pycache__,\
    $(patsubst %/,%,$(wildcard tests/*/)))
PYTEST = $(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder --durations=10 \
    --junitxml=build/tests.xml

# test-2.11 and so on, one for each lock of a torch that is not the pinned one.
PAIR_TESTS := $(sort $(patsubst requirements/torch-%.lock,test-%,$(wildcard requirements/torch-*.lock)))

.PHONY: help install quickstart test test-all faults mutants test-pairs $(PAIR_TESTS) test-oldest test-cuda-lock \
    test-wheel test-docker lint format docs bench clean

help: ## Show this text.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(INSTALLED): $(PINS)
	requirements/make_venv.sh $(VENV) $(DEVICE)
	@rm -f $(VENV)/.installed-*
	@touch $@

$(INSTALLED_TEST): $(PINS)
	requirements/make_venv.sh $(VENV) $(DEVICE) test
	@rm -f $(VENV)/.installed-*
	@touch $(INSTALLED) $@

$(INSTALLED_DEV): $(PINS)
	requirements/make_venv.sh $(VENV) $(DEVICE) dev
	@rm -f $(VENV)/.installed-*
	@touch $(INSTALLED) $(INSTALLED_TEST) $@

# A fresh install removes this mark, so that the pins of the docs are checked again.
$(INSTALLED_DOCS): $(INSTALLED) requirements/docs.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -r requirements/docs.lock
	@touch $@

install: $(INSTALLED) ## Make .venv with the pinned packages and hotrec in it.

quickstart: $(INSTALLED) ## Install, then train a DLRM on a real click log with two workers.
	HOTREC_RUN_DIR=runs/quickstart/$$(date +%Y%m%d-%H%M%S) $(BIN)/hotrec run experiment=quickstart \
	    launch.num_ranks=2 run.compare=true >/dev/null
	@echo '`. $(BIN)/activate` puts hotrec on your path.'

test: $(INSTALLED_TEST) ## Install what the tests need, then show in five minutes that hotrec is right.
	$(PYTEST) $(PICKED) $(TESTS) $(ARGS)

# How many trainings tests/exact draws; from 250 on other tables run whole, from 500 on examples are random.
CASES ?= 250

test-all: JOBS = 2
test-all: $(INSTALLED_DEV) ## Run all tests; CASES=1000 draws more, at random.
	$(PYTEST) --cases=$(CASES) $(ALL_TESTS) $(ARGS)

faults: $(INSTALLED_DEV) ## Run every case of damaged files, bad data and signals.
	$(BIN)/python -m tests.faults $(ARGS)

mutants: $(INSTALLED_DEV) ## Put one fault after the other into a copy of the code; tests must notice each.
	$(BIN)/python -m tests.mutants run $(ARGS)

test-pairs: ## Run make test with every torch and its torchrec, each in an environment of its own.
	$(MAKE) --keep-going $(PAIR_TESTS) test TORCH=

# One of them; the environment is .venv-2.11 and so on.
$(PAIR_TESTS): test-%:
	$(MAKE) test TORCH=$* VENV=$(VENV)-$*

test-oldest: ## Run make test with the oldest torch and its torchrec.
	$(MAKE) $(firstword $(PAIR_TESTS))

test-cuda-lock: ## Install the CUDA lock into a temporary environment and import it; no GPU needed.
	requirements/check_cuda_lock.sh

test-wheel: ## Install the wheel with the extra cpu into a bare environment by pip alone, and train with it.
	requirements/check_wheel.sh

test-docker: ## Build the CPU image and train on the two hosts of docker/compose.yaml; needs a Docker engine.
	docker/try.sh $(ARGS)

lint: $(INSTALLED_DEV) ## Run ruff, mypy, and the tests of the code itself: faults that fit, layers, names, size, pins, commands in docs.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.mutants check
	$(PYTEST) tests/policy

format: $(INSTALLED_DEV) ## Fix with ruff what it can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED_DOCS) ## Build the documentation into build/docs, with warnings as errors.
	$(BIN)/python -m sphinx -W --keep-going -b html docs build/docs
	@echo "docs: build/docs/index.html"

bench: $(INSTALLED) ## Compare hot/cold with TorchRec's own plans, interleaved in one run.
	$(BIN)/hotrec compare plans=criteo_like_b2048

clean: ## Remove the environments and the caches; data and runs stay.
	rm -rf $(VENV) $(PAIR_TESTS:test-%=$(VENV)-%) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
