# Every command prepares its environment by itself; see `make help`.
#   PYTHON=python3.12            interpreter that makes .venv (default: python3)
#   STACK=cpu|cuda|npu           what .venv is made for (default: cpu)
#   HYBRIDREC_PYTHON=/path       an environment of your own, used as it is instead of .venv
#   ARGS="..."                   more arguments for the demo, pytest or the benchmark

PYTHON ?= python3
STACK ?= cpu
ARGS ?=
ifdef HYBRIDREC_PYTHON
PY := $(HYBRIDREC_PYTHON)
PYTHON := $(PY)
else
PY := .venv/bin/python
endif

.DEFAULT_GOAL := help
.PHONY: help env demo tutorial test slow npu-stack npu-api lint format bench overlap bench-checkpoint clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18
	@sed -n 's/^#   //p' $(MAKEFILE_LIST)

env:  ## make or refresh .venv (all others do this first)
	@$(PYTHON) -c 'import sys; sys.exit("hybridrec needs Python 3.11 or later: make PYTHON=python3.11 ..." \
	    if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) tools/setup_env.py --stack $(STACK)

demo: env  ## train a small recommender on two CPU processes
	@examples/little_demo/run.sh $(ARGS)

tutorial: env  ## TorchRec's introductory tutorial with hashed tables, each step checked beside TorchRec's (a minute)
	@examples/torchrec_tutorial/run.sh $(ARGS)

test: env  ## run the test suite, without the slow tests
	@$(PY) -m pytest -m "not slow" $(ARGS)

slow: env  ## run the slow tests: packaging, larger worlds, sanitizers
	@$(PY) -m pytest -m slow $(ARGS)

npu-stack:  ## run the suite on the NPU stack's versions, in .venv-npu-stack (7 GB, an hour)
	@$(PYTHON) tools/setup_env.py --stack npu-stack
	@.venv-npu-stack/bin/python -m pytest -m "not slow" $(ARGS)

npu-api:  ## check that the real torch-npu, over a stub of CANN, has all that is called
	@$(PYTHON) tools/setup_env.py --stack npu-stack
	@.venv-npu-stack/bin/python -m tests.npu_api $(ARGS)

lint: env  ## ruff, mypy, import-linter, codespell
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(dir $(PY))lint-imports
	$(PY) -m codespell_lib

format: env  ## rewrite the Python sources as ruff formats them
	$(PY) -m ruff check --fix-only --select I .
	$(PY) -m ruff format .

bench: env  ## measure one training step against FBGEMM's bare table (a minute)
	@$(PY) -m benchmarks.step $(ARGS)

overlap: env  ## measure how much host traffic the pipeline hides (three minutes)
	@$(PY) -m benchmarks.overlap $(ARGS)

bench-checkpoint: env  ## measure snapshots and deltas against dd, on one and two ranks (two minutes on a quiet machine)
	@$(PY) -m benchmarks.checkpoint --quick --ranks 1 2 $(ARGS)

clean:  ## remove .venv, build products and caches
	rm -rf .venv .venv-npu-stack build dist .stamps .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
