# All targets use .venv; `make test VENV=path` uses another environment.
VENV ?= .venv
PYTHON = $(VENV)/bin/python
PYTEST = $(PYTHON) -m pytest
SETUP = RAYLEARNER_VENV=$(VENV) bash launch/setup.sh
# One process each. The parts that start a Ray cluster run one after another, beside the others.
CLUSTER_PARTS = tests/e2e tests/ray tests/chaos
OTHER_PARTS = tests/vllm tests/learner tests/unit tests/services tests/oracle

.DEFAULT_GOAL := help
.PHONY: help setup fmt fmt-check lint types docs test test-unit test-ray test-benchmarks test-gpu check clusters $(OTHER_PARTS)

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

docs: ## Generate the references, then build the site into build/site
	@[ -x $(PYTHON) ] || $(SETUP)
	@$(PYTHON) -c "import furo, myst_parser, sphinx_copybutton" 2>/dev/null || \
		$(PYTHON) -m pip install -q -r requirements-dev.txt
	$(PYTHON) docs/generate.py
	$(PYTHON) -m sphinx -b html -W --keep-going -q docs build/site
	@echo "build/site/index.html is the first page"

test: ## Set up, then run all tests that need no GPU, one process per folder
	@$(SETUP)
	@OMP_NUM_THREADS=1 $(MAKE) --no-print-directory -k -j 2 -O clusters $(OTHER_PARTS)

clusters:
	@failed=0; for part in $(CLUSTER_PARTS); do \
		echo "== $$part"; $(PYTEST) $$part || failed=1; \
	done; exit $$failed

$(OTHER_PARTS):
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
