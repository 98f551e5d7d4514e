# Everything a developer runs. `make help` lists it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Every worker has servers of its own. One process, as for --pdb: make test WORKERS=
WORKERS ?= --numprocesses=auto --maxprocesses=4 --dist=loadgroup
READY  := $(VENV)/.ready-$(shell cksum < pyproject.toml | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help setup demo failures test test-long check lint types bench soak fire clean

help:  ## list what can be made
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; say which with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) (first run only) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

setup: $(READY)  ## make the virtual environment (.venv) with everything for development

demo: $(READY)  ## the wallet demo: crashes, duplicates and late events on real servers, expected beside actual
	@$(BIN)/python -m examples.wallet

failures: $(READY)  ## the failure gallery: each classic loss, the naive way beside ours, on every server there is (1 minute)
	@$(BIN)/python -m examples.failures $(ARGS)

test: $(READY)  ## all tests, on embedded PostgreSQL and Valkey (or DATABASE_URL / REDIS_URL)
	@$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-long: $(READY)  ## what `make test` leaves out because it takes long: soak, clusters, poolers, stand-bys, gallery (10 minutes)
	@$(BIN)/python -m pytest -m long $(WORKERS) $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY)
	@$(BIN)/mypy

check: lint types test  ## lint, types and tests; CI runs this and test-long

bench: $(READY)  ## measure relay and consumer beside their baselines: a table, and JSON in benchmarks/results.json
	@$(BIN)/python -m benchmarks $(ARGS)

SECONDS ?= 60
soak: $(READY)  ## every fault at random under load, then every invariant: make soak SECONDS=600 ARGS=--cluster
	@$(BIN)/python -m tests.faults.soak $(SECONDS) $(ARGS)

fire: $(READY)  ## jobs while producers, workers and relays are killed at random: make fire SECONDS=60 ARGS="--cluster --server redis7"
	@$(BIN)/python -m tests.faults.fire $(SECONDS) $(ARGS)

clean:  ## remove the virtual environment and caches
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
