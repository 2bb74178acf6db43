# `make demo` and `make test` do all the set-up on a fresh clone. Variables:
#   PYTHON   interpreter to make the environment with, 3.11 or newer          make test PYTHON=python3.12
#   ENGINE   engine version other than the pinned one, in a .venv of its own  make test ENGINE=0.5.21
#   VENV     where the environment goes                                       make test VENV=/big/disk/venv
#   NIGHTLY  1: nightly files too                                             make test NIGHTLY=1
#   ARGS     goes to pytest                                                   make test ARGS=-x

PYTHON ?= python3
PINNED_ENGINE := $(shell sed -n 's/^sglang==//p' constraints.txt)
override ENGINE := $(or $(ENGINE),$(PINNED_ENGINE))
VENV ?= .venv$(if $(filter-out $(PINNED_ENGINE),$(ENGINE)),-$(ENGINE))
HW ?= cpu

BIN := $(VENV)/bin
RUN_SUITE = "$(BIN)/python" test/run_suite.py $(if $(NIGHTLY),--nightly)

.DEFAULT_GOAL := help
.PHONY: help env demo test lint format lane lanes readme clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

env: ## the virtual environment with the pinned engine (about 4 minutes and 10.5 GB the first time)
	@command -v "$(PYTHON)" >/dev/null || { echo "error: $(PYTHON) not found: install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than Python 3.11, which the pinned engine needs; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@"$(PYTHON)" scripts/setup_env.py --venv "$(VENV)" --engine "$(ENGINE)"

demo: env ## the requant through the patched engine, bytes checked; on the GPU where there is one
	@"$(BIN)/sglang-w4afp8" demo

test: lint ## lint, then every lane that this machine can run
	@$(RUN_SUITE) --hw cpu -- $(ARGS)
	@if "$(BIN)/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(RUN_SUITE) --hw cuda -- $(ARGS); fi

lint: env ## ruff: rules and format
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .

format: env ## ruff: fix what can be fixed, and format
	@"$(BIN)/ruff" check --fix .
	@"$(BIN)/ruff" format .

lane: env ## one lane: HW=cpu|cuda SUITE=name (all lanes of HW without SUITE)
	@$(RUN_SUITE) --hw $(HW) $(if $(SUITE),--suite $(SUITE)) -- $(ARGS)

lanes: env ## what lanes there are
	@$(RUN_SUITE) --list

readme: env ## write the README's generated parts anew
	@"$(BIN)/python" scripts/render_readme.py

clean: ## remove environments, caches and builds
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
