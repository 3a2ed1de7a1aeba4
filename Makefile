# All targets use .venv; `make test VENV=path` uses another environment.
VENV ?= .venv
PYTHON = $(VENV)/bin/python
PYTEST = $(PYTHON) -m pytest
SETUP = RAYLEARNER_VENV=$(VENV) bash launch/setup.sh
# One process each, longest first; two run at a time.
SMALL_PARTS = tests/vllm tests/learner tests/unit tests/services tests/oracle
# One at a time: each starts a Ray cluster.
LARGE_PARTS = tests/ray tests/e2e

.DEFAULT_GOAL := help
.PHONY: help setup fmt fmt-check lint types docs test test-unit test-ray test-benchmarks test-gpu check $(SMALL_PARTS) $(LARGE_PARTS)

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Create the environment with development tools
	@$(SETUP) dev

fmt: ## Format, and fix lint errors that ruff can fix
	$(PYTHON) -m ruff check --fix . && $(PYTHON) -m ruff format .

fmt-check:
	$(PYTHON) -m ruff format --check .

lint: ## Lint
	$(PYTHON) -m ruff check .

types: ## Check types, strictly where pyproject.toml says so
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

docs: ## Generate the key and metric references and the Grafana dashboard
	$(PYTHON) docs/generate.py

test: ## Set up, then run all tests that need no GPU, one process per folder
	@$(SETUP)
	@failed=0; \
	OMP_NUM_THREADS=1 $(MAKE) --no-print-directory -k -j 2 -O $(SMALL_PARTS) || failed=1; \
	$(MAKE) --no-print-directory -k $(LARGE_PARTS) || failed=1; \
	exit $$failed

$(SMALL_PARTS) $(LARGE_PARTS):
	@echo "== $@"; $(PYTEST) $@

test-unit: ## Run only the unit tests: no Ray, no engine, two minutes
	$(PYTEST) tests/unit

test-ray: ## Run the tests that start a local Ray
	$(PYTEST) tests/ray

test-benchmarks: ## Run the tests of the benchmark scripts, at reduced size
	$(PYTEST) benchmarks/tests

test-gpu: ## Run the tests that need GPUs
	$(PYTEST) tests -m "gpu or multi_gpu"

check: setup fmt-check lint types test ## Everything that must pass before a push
