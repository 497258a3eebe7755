# make train                  learn to research, on a bare machine (ARGS="train.steps=10 ..." overrides settings)
# make test | test-long       the fast tests | the ones that take minutes
# make lint | bench           ruff | the benchmarks
#
# Everything is installed into .venv once; changed kernels or a changed pyproject.toml install anew.
# TORCH chooses the build of torch, e.g. TORCH="torch==2.13.0 --index-url URL_OF_A_CPU_OR_CUDA_INDEX".

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
NATIVE := setup.py $(wildcard csrc/*)
PY := .venv/bin/python
# --no-compile: Python compiles what it imports anyway, and torch has thousands of files more (55 -> 17 s).
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: train test test-long lint bench

train: .venv/installed
	$(PY) -m minirler.train $(ARGS)

test: .venv/installed-test
	$(PY) -m pytest -q -m "not long" $(ARGS)

test-long: .venv/installed-test
	$(PY) -m pytest -q -m long $(ARGS)

lint: .venv/installed-test
	$(PY) -m ruff check .

bench: .venv/installed
	@for script in bench/*.py; do echo "== $$script"; $(PY) "$$script" || exit 1; done

.venv/created:
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) is missing: install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "minirler needs Python 3.11 or newer, $(PYTHON) is older: name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/torch: .venv/created
	@echo "installing $(TORCH) into .venv (once)"
	$(PIP) $(TORCH)
	@touch $@

.venv/installed: .venv/torch pyproject.toml $(NATIVE)
	$(PIP) -e .
	@touch $@

.venv/installed-test: .venv/torch pyproject.toml $(NATIVE)
	$(PIP) -e ".[test]"
	@touch $@ .venv/installed
