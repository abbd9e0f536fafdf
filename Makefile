# `make serve` runs everything on this machine; `make test` checks everything. Both set up .venv on first use.
#
#   make serve ARGS="--decode 2"     more options; .venv/bin/diptych up --help lists them
#   make serve PYTHON=python3.12     an interpreter other than python3
#   make serve PIP_ARGS="..."        more options for pip, for example an index with CPU builds of torch

PYTHON ?= python3
ARGS ?=
PIP_ARGS ?=

BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
NIXL := nixl-cu13==1.5.1
COMPILER := $(shell command -v cc || command -v gcc || command -v clang)
comma := ,
EXTRAS := demo$(if $(COMPILER),,$(comma)compiler)
INPUTS := pyproject.toml constraints.txt

.PHONY: serve test nixl lint bench chaos proto constraints clean

serve: .venv/serve.stamp
	@$(BIN)/diptych up $(ARGS)

test: lint .nixl/stamp
	$(BIN)/python -m pytest $(ARGS)

# NIXL beside .venv, not in it: the UCX that it brings would be preferred to the one that the tests run on.
nixl: .nixl/stamp

lint: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: .venv/dev.stamp
	@for file in $$(grep -l "^from report import" bench/*.py); do echo "== $$file"; $(BIN)/python $$file $(ARGS) || exit 1; done

# A thousand requests, a fault every second. As root also with links that are cut.
chaos: .venv/dev.stamp
	$(BIN)/python bench/chaos.py $(ARGS)

proto: .venv/dev.stamp
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto proto/diptych/v1/*.proto

# Pins what .venv holds now: change a version there, run the tests, then this.
constraints: .venv/dev.stamp
	$(INSTALL) -e ".[compiler]"
	@grep '^#' constraints.txt > .venv/constraints.txt
	@$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//' | sort -f >> .venv/constraints.txt
	mv .venv/constraints.txt constraints.txt

clean:
	rm -rf .venv .nixl dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find bench kernels kvtransfer proto services tests -name __pycache__ -prune -exec rm -rf {} +

.venv/serve.stamp: .venv/bin/python $(INPUTS)
	@echo "Installing Diptych into .venv (once; torch takes a few minutes) ..."
	@$(INSTALL) -e ".[$(EXTRAS)]"
	@$(BIN)/diptych build
	@touch $@

.venv/dev.stamp: .venv/bin/python $(INPUTS)
	@echo "Installing Diptych and its development tools into .venv ..."
	@$(INSTALL) -e ".[$(EXTRAS),dev]"
	@$(BIN)/diptych build
	@touch $@ .venv/serve.stamp

.nixl/stamp: Makefile .venv/bin/python
	@$(INSTALL) --quiet --no-deps --upgrade --target .nixl $(NIXL) || echo "No NIXL here: its tests are skipped."
	@mkdir -p .nixl && touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Diptych needs Python 3.11 or newer, and $(PYTHON) is missing or older: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
