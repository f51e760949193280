PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
# Only what is imported is compiled, at its first import: half of the time of pip would go into the rest.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE
JOBS ?= 3
MARKED ?= not nightly

MODULES ?=

SECONDS ?= 120

.PHONY: help demo test nightly check lint fuzz mutate format bench docs clean

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Paceline and what it needs into $(VENV) (once, a few minutes)..."
	@$(INSTALL) torch -e '.[dev]'
	@touch $@ $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Paceline and what the demo needs into $(VENV) (once, a minute or two)..."
	@$(INSTALL) torch -e '.[plot,torch]'
	@touch $@

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1: /p' Makefile

demo: $(DEMO_STAMP)  ## train the digits on 4 uneven workers: plain equal split against Paceline
	@$(BIN)/paceline train --data digits --workers 4 --slowdown 1,1,1,4 --epochs 20 --compare equal,level

test: $(STAMP)  ## what every change must pass: all tests but those marked nightly
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "$(MARKED)"

nightly: $(STAMP)  ## every test, with three times as many random cases
	PACELINE_THOROUGH=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

check: lint fuzz  ## lint, format, types and the map of imports; the service's API against its own description

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports --no-logo

fuzz: $(STAMP)  ## malformed and made-up requests to the service, for SECONDS: nothing but documented answers
	@cd tests && PYTHONPATH=../src ../$(BIN)/python -m support.fuzz $(SECONDS)

mutate: $(STAMP)  ## mutants of the decisions, or of MODULES='shares samples/pool': their tests must fail (hours)
	nice -n 15 $(BIN)/python tests/mutate.py $(MODULES)

format: $(STAMP)  ## rewrite what lint would complain of
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## every benchmark, one after another, but that for a GPU
	@for b in $(filter-out benchmarks/gpu.py,$(wildcard benchmarks/*.py)); do echo "== $$b"; $(BIN)/python $$b || exit 1; done

docs: $(STAMP)  ## the site, into site/; stops at the first broken link
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "Open site/index.html"

clean:  ## remove the site, the environment and all caches
	rm -rf site $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
