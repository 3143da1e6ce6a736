# `make` lists the targets. All of them share one virtual environment, and each target adds the extras
# that it needs. make calls pip only if pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
# Test processes, each with one thread.
JOBS ?= 2
# Passed on to packprop profile, pytest or the benchmarks: make test ARGS="-k floors"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin

# This acts as `-c constraints.txt` on every pip call, and also reaches isolated builds.
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two pips that run in one environment break it.
.NOTPARALLEL:

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.installed-examples $(VENV)/.installed-report ## Profile a small network on real data; the page is profile/profile.html
	$(BIN)/packprop profile --output profile $(ARGS)

TESTS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: test
test: $(VENV)/.installed-test ## Run the tests that guard every part: three minutes on two cores
	$(TESTS) -m "not thorough" $(ARGS)

.PHONY: test-all
test-all: test ## Run all tests: first `make test`, then kills, ranks, compilers, and every case in every size
	$(TESTS) -m thorough $(ARGS)

.PHONY: hunt
hunt: $(VENV)/.installed-test ## Compare random programs with plain autograd: make hunt ARGS="--graphs 5000"; functions of PyTorch: ARGS="--operators"
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m tests.hunt --jobs $(JOBS) $(ARGS)

.PHONY: mutations
mutations: $(VENV)/.installed-test ## Change the engine in 30 places, and count the changes that `make test` finds: make mutations ARGS="--seed 1"
	$(BIN)/python -m tests.mutations --jobs $(JOBS) $(ARGS)

.PHONY: kills
kills: $(VENV)/.installed-test ## Kill runs over data at random moments, and compare results bit by bit: make kills ARGS="--kills 1000 --ranks 2"
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m tests.dataset.kills --jobs $(JOBS) $(ARGS)

.PHONY: corruption
corruption: $(VENV)/.installed-test ## Damage files of checkpoints, results and stores, and check that no result is wrong: make corruption ARGS="--files 500"
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m tests.dataset.corruption $(ARGS)

.PHONY: ranks
ranks: $(VENV)/.installed-test ## Compare several processes with a single one, on all cases: make ranks ARGS="--ranks 2 --kind DDP"
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.distributed $(ARGS)

.PHONY: lint lint-style lint-format lint-types
lint: lint-style lint-format lint-types ## Check style, formatting and types
lint-style: $(VENV)/.installed-lint
	$(BIN)/ruff check .
lint-format: $(VENV)/.installed-lint
	$(BIN)/ruff format --check .
lint-types: $(VENV)/.installed-lint
	$(BIN)/mypy

.PHONY: format
format: $(VENV)/.installed-lint ## Put the code in its standard format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: coverage-table
coverage-table: $(VENV)/.installed-test ## Write docs/coverage.md: each extension on each use and loss
	$(BIN)/python -W ignore -m tests.house.coverage_page > docs/coverage.md.new
	mv docs/coverage.md.new docs/coverage.md

.PHONY: bench
bench: $(VENV)/.installed-bench ## Compare time and memory with other libraries
	$(BIN)/python -m benchmarks.run $(ARGS)

# This installs nothing: PYTHON is an interpreter whose torch sees the GPU, with rich, safetensors and pytest.
.PHONY: gpu
gpu: ## Run the steps that need a GPU, and continue where the last call stopped: make gpu ARGS="--device cpu --small"
	$(PYTHON) -m benchmarks.gpu $(ARGS)

.PHONY: gallery
gallery: $(VENV)/.installed-test $(VENV)/.installed-gallery ## Run the pages of the gallery, and save what they print
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python docs/render_gallery.py $(ARGS)

.PHONY: docs
docs: $(VENV)/.installed-docs ## Build the site into build/site; warnings are errors
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -b html -c docs/site -d build/doctrees -W --keep-going -q \
	    $(ARGS) . build/site
	@echo "build/site/index.html"

.PHONY: dist
dist: $(VENV)/.installed-dist ## Build wheel and source distribution into dist/, install the wheel, and test it
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m tests.distribution.check dist

.PHONY: matrix
matrix: $(VENV)/.created ## Run tests under other versions: make matrix ARGS="--python 3.11 --torch 2.6.0"
	env -u PIP_CONSTRAINT $(BIN)/python -m benchmarks.matrix $(ARGS)

.PHONY: hooks
hooks: $(VENV)/.installed-dev ## Install git hooks that check every commit
	$(BIN)/pre-commit install

.PHONY: clean
clean: ## Remove everything that make has made, including the virtual environment
	rm -rf $(VENV) build dist profile *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A separate file marks success, so that an interrupted creation starts again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "packprop needs Python 3.11 or newer; PYTHON=$(PYTHON) gives:" \
	        "$$($(PYTHON) --version 2>&1 || true)." >&2; \
	    echo "Name a newer one, for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-%: $(VENV)/.created pyproject.toml constraints.txt
	$(BIN)/python -m pip install --editable '.[$*]'
	@touch $@
