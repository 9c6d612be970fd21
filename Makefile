# make train         watch a policy learn: creates .venv, then runs CONFIG with the overrides in ARGS
# make test          lint, types, and every kind of test, including those on the real stack
# make test-fast     tests that need no engine and are not marked slow: a minute and a half
# make test-deep     with eight times as many random examples, and with the tests of the real stack that `test` omits: half an hour
# make test-docs     runs the tutorial's commands in order: three minutes
# make test-gpu      tests that need a GPU, in ten minutes, with the packages of GPU_PYTHON; reports what it skips and why
# make test-hosts    tests with several hosts, as network namespaces of this machine, as root: a quarter of an hour
# make test-clients  tests with published clients, agents, trainers and servers, which it installs from the package index
# make test-models   every model family in the trainer and in the vLLM engine, with tiny models: five minutes; writes their page of the docs
# make coverage      lines and branches that the tests run, including subprocesses; build/coverage/html has each file
# make docs          the docs as a site, build/docs/index.html; a warning fails the build
#
#   make train CONFIG=examples/alphabet_sort/cpu.toml ARGS="--training.steps 5"
#   make train EXTRA=gpu CONFIG=examples/alphabet_sort/qwen3_0_6b.toml

CONFIG ?= examples/alphabet_sort/cpu.toml
ARGS ?=
EXTRA ?= cpu

BIN := .venv/bin
# Two workers, because tests of the real stack spend much of their time waiting. The tests of a file run in one worker, so that
# they share what they start. tests/conftest.py orders the files by their duration, longest first.
PYTEST = $(BIN)/pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0
STAMP = .venv/installed-$(EXTRA)
# The first Python that is new enough and can make a virtual environment.
PYTHON = $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# Engines and trainers are processes that share the cores; additional threads would only compete for them.
export OMP_NUM_THREADS ?= 1
# Tests start many processes, so the modules that they import are compiled only once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs train test test-all test-fast test-deep test-docs test-hosts test-gpu test-clients test-models lint types format install clean distclean

train: $(STAMP)
	$(BIN)/titan-rl train $(CONFIG) $(ARGS)

# Types are checked at the same time as the first tests, which wait at times. A failure of either fails the target.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 types test-all

test-all: $(STAMP)
	$(PYTEST)

test-fast: $(STAMP)
	$(PYTEST) --ignore=tests/e2e --ignore=tests/hosts -m "not slow"

test-deep: $(STAMP)
	TITAN_RL_TEST_DEPTH=deep $(PYTEST)

test-hosts: $(STAMP)
	TITAN_RL_TEST_HOSTS=1 $(BIN)/pytest tests/hosts

test-clients: $(STAMP)
	TITAN_RL_TEST_CLIENTS=1 $(BIN)/pytest tests/serving/test_clients.py tests/adapters/test_real_trl.py tests/adapters/test_real_openenv.py tests/metrics/test_real_sinks.py tests/test_wheel.py

test-models: $(STAMP)
	TITAN_RL_TEST_MODELS=1 $(BIN)/pytest tests/models --deselect tests/models/test_models_page.py
	$(BIN)/python -m scripts.write_model_docs

# A Python that has torch for CUDA. The installed packages determine which tests run.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
test-gpu:
	$(GPU_PYTHON) scripts/test_gpu.py

test-docs: $(STAMP)
	TITAN_RL_TEST_DOCS=1 $(BIN)/pytest tests/docs/test_tutorial.py

docs: $(STAMP)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs/site --doctree-dir build/doctrees docs build/docs

coverage: $(STAMP)
	@mkdir -p build/coverage
	$(PYTEST) --ignore=tests/e2e --cov --cov-report=term --cov-report=html

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
