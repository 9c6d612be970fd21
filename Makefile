# make train   watch a policy learn: sets up .venv, then runs CONFIG with the overrides in ARGS
# make test    lint, types, and every test, those on the real stack included
# make test-fast    what needs no engine: about a minute
# make test-deep    what needs no engine, with eight times as many random examples
# make test-clients    clients, agents, trainers and servers of others as they are published, from the package index
#
#   make train CONFIG=examples/alphabet_sort/cpu.toml ARGS="--training.steps 5"
#   make train EXTRA=gpu CONFIG=examples/alphabet_sort/qwen3_0_6b.toml

CONFIG ?= examples/alphabet_sort/cpu.toml
ARGS ?=
EXTRA ?= cpu

BIN := .venv/bin
# Two at a time, because much of a test of the real stack is waiting. What is in one file shares what it starts; the files
# come in the order of tests/conftest.py, in which the longest are first.
PYTEST = $(BIN)/pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0
STAMP = .venv/installed-$(EXTRA)
# The first Python that is new enough and can make a virtual environment.
PYTHON = $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# Engines and trainers share the cores as processes; threads on top of that only get in each other's way.
export OMP_NUM_THREADS ?= 1
# Tests start many processes: what they import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all test-fast test-deep test-clients lint types format install clean distclean

train: $(STAMP)
	$(BIN)/titan-rl train $(CONFIG) $(ARGS)

# Types are checked beside the first tests, which wait at times; a failure of either fails it all.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 types test-all

test-all: $(STAMP)
	$(PYTEST)

test-fast: $(STAMP)
	$(PYTEST) --ignore=tests/e2e

test-deep: $(STAMP)
	TITAN_RL_TEST_DEPTH=deep $(PYTEST) --ignore=tests/e2e

test-clients: $(STAMP)
	TITAN_RL_TEST_CLIENTS=1 $(BIN)/pytest tests/serving/test_clients.py tests/adapters/test_real_trl.py tests/adapters/test_real_openenv.py

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

install: $(STAMP)

$(STAMP): pyproject.toml scripts/install.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with its venv module is needed;" \
		"on Debian and Ubuntu: apt install python3.11-venv" >&2; exit 1; }
	@$(PYTHON) scripts/install.py $(EXTRA)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find titan_rl tests examples scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
