# `make` lists the targets. Each makes or refreshes the environment that it needs (scripts/venv.sh).
VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=
export PYTHON

BIN := $(VENV)/bin
RUN := $(BIN)/python -m
SOURCES := kvtool kernels presets scripts tests

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-triton36 lint fmt bench readme core full

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile
	@echo "Options: VENV=$(VENV), PYTHON=/path/to/python3, JOBS=$(JOBS), PYTEST_ARGS='-k size'"

demo: core ## install kvtool alone into .venv: sizes, what fits, waste, forks, shared prefixes, a scheduler; no GPU
	$(BIN)/kvtool size llama-3-70b -c 8k -b 1,64
	$(BIN)/kvtool size gemma-3-27b --explain
	$(BIN)/kvtool plan llama-3-70b --gpu h100:8 --engine vllm -c 8k -b 64
	$(BIN)/kvtool fragment --dist zipf
	$(BIN)/python scripts/demo_forks.py
	$(BIN)/kvtool prefix --workload agent --capacity 4GiB,16GiB --model llama-3-8b
	$(BIN)/kvtool simulate --workload chat --num-requests 1000 --rate 16 --model llama-3-8b --gpu h100

test: full ## the tests, with every extra; not the slow ones
	$(RUN) pytest -n $(JOBS) -m "not slow" $(PYTEST_ARGS)

test-full: full ## all tests, the slow ones too
	$(RUN) pytest -n $(JOBS) $(PYTEST_ARGS)

test-triton36: ## the kernels' tests with triton 3.6.0, in an environment of their own
	sh scripts/triton36.sh "$(VENV)-triton36" $(PYTEST_ARGS)

lint: full ## style, types and the order of the modules
	$(RUN) ruff check $(SOURCES)
	$(RUN) ruff format --check $(SOURCES)
	$(RUN) mypy
	$(BIN)/lint-imports --no-logo

fmt: full ## format, and fix what ruff can fix
	$(RUN) ruff check --fix $(SOURCES)
	$(RUN) ruff format $(SOURCES)

bench: core ## start-up, simulators, prefix caches, plans and the CPU kernel against goals, twins and peers
	$(BIN)/python scripts/bench_startup.py
	$(BIN)/python scripts/bench_simulators.py
	$(BIN)/python scripts/bench_simulate.py
	$(BIN)/python scripts/bench_prefix.py
	$(BIN)/python scripts/bench_plan.py
	$(BIN)/python scripts/bench_attention.py

readme: full ## write every output in README.md and docs/ anew
	$(BIN)/python scripts/readme.py

core:
	@sh scripts/venv.sh "$(VENV)" core

full:
	@sh scripts/venv.sh "$(VENV)" full
