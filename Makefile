# make test    everything that must hold on a machine without a GPU: style, types, tests
# make check   style and types only        make slow   minutes of training
# make gpu     tests that need a Hopper GPU
# make format  rewrite the Python files in the project's style

SHELL := /bin/bash
PY := $(if $(TPF_VENV),$(TPF_VENV),.venv)/bin/python
JOBS ?= 2

.PHONY: env check test slow gpu docs format

env:
	@. cli/env.sh dev

check: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

test: check
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile

slow: env
	$(PY) -m pytest -m slow

gpu: env
	$(PY) -m pytest -m gpu

docs: env
	$(PY) -m tpf.cli.helptext > docs/cli.txt

format: env
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
