# Every target makes or refreshes .venv by itself; it needs Python 3.11 or later, and pip.
#   make train                          the built-in job, on generated data
#   make train ARGS="run.toml --json"   your own
#   make test ARGS="-k planner"         some of the tests
#   make test-all                       what `make test` leaves out: exhaustive cases, fuzzers, pages
#   make test-all ARGS="--part 0/6"     a sixth of that
#   make test ARGS="-m gpu -n 6 -p no:benchmark"    those that need a CUDA device
#   make clients                        public models of five libraries, plain beside converted;
#                                       see benchmarks/clients/README.md

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.installed
ARGS ?=

.PHONY: train test test-all check clients
.DELETE_ON_ERROR:

train: $(STAMP)
	$(VENV)/bin/hotrow train $(ARGS)

test: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not gpu and not slow" $(ARGS)

test-all: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "slow and not gpu" $(ARGS)

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clients: $(CLIENTS_STAMP)
	$(CLIENTS)/bin/python benchmarks/clients $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("hotrow needs Python 3.11 or later; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

# Their pins contradict those of constraints.txt, so they get an environment of their own.
$(CLIENTS_STAMP): pyproject.toml benchmarks/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install -r benchmarks/clients/requirements.txt -e .
	@touch $@
