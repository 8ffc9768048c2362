# `make run` and `make test` work on a fresh machine with Python >= 3.11: no Java, Docker or Kafka needed.

SHELL := /bin/bash
BIN := .venv/bin
READY := .venv/ready

# The first Python that is new enough; a name on the PATH may be a shim that does not run.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 $$(ls -d ~/.pyenv/versions/3.1[1-9].*/bin/python3 2>/dev/null); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

.PHONY: setup run test test-slow check simulate test-containers bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "marq needs Python 3.11 or later; none found. Set PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[worker,pipeline,demo,dev]"
	$(BIN)/python -m app.kafka.broker
	$(BIN)/python -m pipeline.jars
	@touch $@

run: setup
	@exec $(BIN)/python -m app up

# Two files at a time: most tests with a Kafka wait more than they work. ARGS="-n 0" runs them one after the other.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not containers" $(ARGS)

# The cases that take minutes, too: kills at many moments, clusters, chaos.
test-slow: setup
	$(BIN)/python -m pytest -m "slow and not containers" $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit $(ARGS)

# Random seeds until stopped; a failing seed is printed and replays exactly.
simulate: setup
	$(BIN)/python -m tests.simulation $(ARGS)

test-containers: setup
	$(BIN)/python -m tests.containers.build_image $(ARGS)

bench: setup
	$(BIN)/python -m bench cycle --batch 500 $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
