# Each target does its own set-up in .venv (see `make env`) and leaves the caller's environment alone.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# A folder with a CPU build of torch 2.13.0; without one `make env` takes PyPI's, with CUDA libraries.
WHEELS ?= ../shared/wheels
MODEL ?=
PORT ?=
DEVICE ?=
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 60
BENCH_ARGS ?=

unexport PYTHONSAFEPATH PYTHONPATH PYTHONHOME VIRTUAL_ENV
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

VENV := $(CURDIR)/.venv/bin
TEST := OMP_NUM_THREADS=1 $(VENV)/python -m pytest

.PHONY: help env xla-env demo test check lint rust nightly fuzz bench lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 14

env: ## .venv with locked packages and a release build of the product
	@$(PYTHON) -I scripts/environment.py --wheels '$(WHEELS)'

xla-env: env ## the interpreter of the XLA route's worker, once for a user, outside of this folder (2.2 GB)
	@$(VENV)/vllm-neuron xla-env create

demo: env ## serve a model cold and warm (MODEL=folder, PORT=number, DEVICE=host or stand-in)
	@$(VENV)/python -m demo.serve $(if $(MODEL),--model '$(MODEL)') $(if $(PORT),--port '$(PORT)') $(if $(DEVICE),--device '$(DEVICE)')

# The part without servers runs beside the part with them and is printed at the end. pytest's exit code 5
# says that a part has none of the tests that PYTEST_ARGS selects. Each part remembers its failures for
# `make test PYTEST_ARGS='--last-failed --last-failed-no-failures none'`.
test: env xla-env lint rust ## everything: lint, Rust tests, Python tests with real servers
	@quick=$$(mktemp); quick_status=0; serve_status=0; \
	$(TEST) -o cache_dir=.pytest_cache/quick -m 'not serve' $(PYTEST_ARGS) > "$$quick" 2>&1 & quick_pid=$$!; \
	trap 'kill $$quick_pid 2>/dev/null || true; rm -f "$$quick"' EXIT; \
	$(TEST) -o cache_dir=.pytest_cache/serve -m serve $(PYTEST_ARGS) || serve_status=$$?; \
	wait $$quick_pid || quick_status=$$?; \
	cat "$$quick"; \
	[[ $$serve_status =~ ^[05]$$ && $$quick_status =~ ^[05]$$ && $$serve_status$$quick_status != 55 ]]

check: env xla-env lint rust ## the quick part of `make test`: no vLLM engine is started
	TEST_SCALE=$${TEST_SCALE:-0.2} $(TEST) -m 'not serve and not cases' $(PYTEST_ARGS)

lint: env ## formatters and linters, Rust and Python
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets --quiet -- -D warnings
	$(VENV)/ruff format --check --quiet .
	$(VENV)/ruff check --quiet .

rust: ## Rust tests, by nextest where it is installed
	@if cargo nextest --version >/dev/null 2>&1; then set -x; cargo nextest run --locked --workspace; \
	else set -x; cargo test --locked --workspace; fi

nightly: env ## the tests of keys, store and NEFF at 25 times their length (TEST_SCALE=number)
	PROPTEST_CASES=$${PROPTEST_CASES:-1000000} cargo test --locked --release --no-fail-fast --package vllm-neuron-core
	TEST_SCALE=$${TEST_SCALE:-25} $(TEST) tests/key tests/store tests/neff tests/attacks $(PYTEST_ARGS)

fuzz: ## the fuzz targets, FUZZ_SECONDS each; needs a nightly toolchain and cargo-fuzz
	for target in entry header neff archive graph; do mkdir -p rust/fuzz/found/$$target; \
	cargo +nightly fuzz run --fuzz-dir rust/fuzz $$target rust/fuzz/found/$$target rust/fuzz/corpus/$$target \
	-- -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=512; done

bench: env ## keys, store and NEFF beside what others do (BENCH_ARGS='--json FILE NAME...'), see docs/benchmarks.md
	@$(VENV)/python -m pip install --quiet --require-hashes --only-binary :all: --requirement requirements/bench.txt
	@$(VENV)/python benches/compare/run.py $(BENCH_ARGS)

lock: ## resolve requirements/*.in again (add UPGRADE=1 for newer versions)
	$(PYTHON) -I scripts/lock.py --wheels '$(WHEELS)' $(if $(UPGRADE),--upgrade)

clean: ## remove .venv and build products
	rm -rf .venv .demo .environment.lock target dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
