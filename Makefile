# Everything runs in .venv; `make test VENV=path` uses another environment.
VENV ?= .venv
PYTHON = $(VENV)/bin/python
PYTEST = $(PYTHON) -m pytest
SETUP = RAYLEARNER_VENV=$(VENV) bash launch/setup.sh
# Parts of one process each, longest first, so that two at a time end together.
SMALL_PARTS = tests/vllm tests/learner tests/unit tests/services tests/oracle
# Parts that take the whole machine: two clusters of Ray would meet.
LARGE_PARTS = tests/ray tests/e2e

.DEFAULT_GOAL := help
.PHONY: help setup fmt fmt-check lint types docs test test-unit test-ray test-gpu check $(SMALL_PARTS) $(LARGE_PARTS)

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make the environment, developers' tools included
	@$(SETUP) dev

fmt: ## Format and mend what ruff can mend
	$(PYTHON) -m ruff check --fix . && $(PYTHON) -m ruff format .

fmt-check:
	$(PYTHON) -m ruff format --check .

lint: ## Lint
	$(PYTHON) -m ruff check .

types: ## Check types, strictly where pyproject.toml says so
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

docs: ## Write what is made from code: keys, metrics, the Grafana dashboard
	$(PYTHON) docs/generate.py

test: ## Set up, then run all tests that need no GPU: one process for each folder
	@$(SETUP)
	@failed=0; \
	OMP_NUM_THREADS=1 $(MAKE) --no-print-directory -k -j 2 -O $(SMALL_PARTS) || failed=1; \
	$(MAKE) --no-print-directory -k $(LARGE_PARTS) || failed=1; \
	exit $$failed

$(SMALL_PARTS) $(LARGE_PARTS):
	@echo "== $@"; $(PYTEST) $@

test-unit: ## Run the unit tests alone: no Ray, no engine, two minutes
	$(PYTEST) tests/unit

test-ray: ## Run the tests that start a local Ray
	$(PYTEST) tests/ray

test-gpu: ## Run the tests that need GPUs
	$(PYTEST) tests -m "gpu or multi_gpu"

check: setup fmt-check lint types test ## All that must pass before a commit is pushed
