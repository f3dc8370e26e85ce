# Everything runs from a virtual environment that make sets up by itself; only Python >= 3.11 is needed before.
PYTHON ?= python3
VENV ?= .venv
# Of the tests, whose ranks wait for each other half of the time: three keep two cores busy.
WORKERS ?= 3
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq
# The processes of one machine share its cores; without this each of them would start a thread for every core.
RUN := OMP_NUM_THREADS=1 $(BIN)/python
# A worker that hung and was ended is not replaced: the run ends and names its test.
PYTEST := $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
TRAIN := $(RUN) -m torch.distributed.run --standalone --nproc-per-node 4 -m examples.train_lm --mesh replica=2,shard=2
PAGES := README.md CONTRIBUTING.md CHANGELOG.md $(wildcard docs/*.md docs/*/*.md)

# The pins hold for installs and for the isolated builds behind them; pip < 25.3 and later read different names.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Tests start hundreds of processes: without bytecode on disk each would compile all of shardfn again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif
.PHONY: help setup train test test-fast another-torch checks lint format fix types unit docs wheel smoke goals test-deep clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo 'Variables: PYTHON=python3  VENV=.venv  WORKERS=3 (of the tests)  ARGS="flags for the one target that is called"'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.examples: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[examples]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.examples $@

setup: $(VENV)/.dev ## install the package and every development tool

train: $(VENV)/.examples ## train the example language model, sharded over 4 processes
	$(TRAIN) $(ARGS)

test: checks unit smoke ## everything that must pass before a change lands

checks: $(VENV)/.dev ## all but the tests and the short run, two at a time
	$(MAKE) --no-print-directory -j 2 SIDE_BY_SIDE=1 lint format types goals docs wheel

lint: $(VENV)/.dev ## check the code's style, and the spelling, which is American
	$(BIN)/ruff check
	$(BIN)/codespell shardfn tests docs examples benchmarks tools $(wildcard *.md)

format: $(VENV)/.dev ## check the code's layout
	$(BIN)/ruff format --check
	$(BIN)/ruff format --check --line-length 88 $(PAGES)

fix: $(VENV)/.dev ## rewrite what lint and format can repair
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/ruff format --line-length 88 $(PAGES)

types: $(VENV)/.dev ## check the types
	$(BIN)/mypy

unit: $(VENV)/.dev ## run the tests, and with them the code in README.md and docs/
	$(PYTEST) --tier=change $(ARGS)

TORCH ?= 2.11.0
another-torch: ## the tests with another torch, which downloads gigabytes: TORCH=2.11.0, the oldest
	$(PYTHON) -m venv $(VENV)-$(TORCH)
	PIP_CONSTRAINT= PIP_BUILD_CONSTRAINT= $(VENV)-$(TORCH)/bin/python -m pip install -qq torch==$(TORCH) -e '.[dev]'
	touch $(VENV)-$(TORCH)/.examples $(VENV)-$(TORCH)/.dev
	$(MAKE) unit VENV=$(VENV)-$(TORCH)

test-fast: $(VENV)/.dev ## the tests that take little, and those of the folders that were edited since the last commit
	$(PYTEST) --tier=fast $(ARGS)

docs: $(VENV)/.dev ## build the documentation; a warning is an error
	$(BIN)/sphinx-build -q -E -W --keep-going docs docs/_build/html

wheel: $(VENV)/.dev ## build the wheel and import it from an empty environment
	bash tools/check_wheel.sh $(BIN)/python

smoke: $(VENV)/.examples ## a short sharded training run
	out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && $(TRAIN) --steps 20 --out "$$out" $(ARGS)

goals: $(VENV)/.dev ## every figure that is promised beside its goal and its record; ARGS=--timed for all of them
	$(RUN) -m benchmarks.goals $(ARGS)

test-deep: $(VENV)/.dev ## what takes too long for every change: all other tests, mutants, random programs, kills (hours)
	$(PYTEST) --tier=deep
	$(RUN) -m tests.mutants --workers 2
	$(RUN) -m tests.random_programs --minutes 10
	$(RUN) -m tests.killed_runs --kills 40
	$(RUN) -m tests.crash --kills 60

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
