# Each target sets up what it needs; nothing is done twice while nothing changed.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
TOOLS := build/tools
TPU := build/tpu
REFERENCE := build/reference
PYTHON := $(shell cat .python-version)
# Found by pip only where the machine has none that runs.
UV := $(shell if uv --version >/dev/null 2>&1; then echo uv; else echo $(TOOLS)/bin/uv; fi)

DEMO := model_name=demo num_cpu_devices=8 ici_fsdp_parallelism=-1 ici_expert_parallelism=2 \
  quantization=fp8_full use_batch_split_schedule=true merge_gating_gmm=true run_name=demo
# The comparison of docs/results/: 21 runs. Say it again to go on where it was interrupted.
COMPARE := --recipes all --seeds 3 --threshold 0.3 \
  --variant 'fp8_full-batch_split quantization=fp8_full use_batch_split_schedule=true' \
  model_name=demo num_cpu_devices=4 ici_fsdp_parallelism=-1 ici_expert_parallelism=2 \
  batch_split_factor=2 steps=1000 eval_interval=100 eval_steps=32 log_period=10 \
  checkpoint_period=250 enable_tensorboard=false run_name=results
PYTEST := $(BIN)/python -m pytest -n 2

.PHONY: help setup demo results test test-aot test-reference test-all lint format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1: \2/p' Makefile

setup: $(STAMP) ## create .venv and install octablox into it

demo: $(STAMP) ## train a small DeepSeek-V3 in FP8 on 8 virtual CPU devices (a few minutes)
	rm -rf runs/demo
	$(BIN)/octablox train $(DEMO)

results: $(TPU)/installed.stamp ## measure all of docs/results again (hours)
	$(BIN)/octablox compare $(COMPARE) || [ $$? -eq 1 ] # a recipe beyond the threshold is shown too
	$(BIN)/octablox check --json docs/results/check.json
	$(BIN)/python -m benchmarks.gmm --json docs/results/gmm.json
	$(BIN)/python -m benchmarks.step --json docs/results/step.json
	PYTHONPATH=$(TPU) $(BIN)/python -m benchmarks.tpu_static --rows 8192 \
	  --json docs/results/tpu_static.json
	$(BIN)/python -m benchmarks.results --compare runs/results

test: $(STAMP) ## all tests but the slow ones and those that need libtpu
	$(PYTEST)

test-aot: $(TPU)/installed.stamp ## compile a few TPU kernels for each chip, without a TPU
	PYTHONPATH=$(TPU) $(PYTEST) -m aot_few tests/test_pallas_tpu.py tests/test_compile.py

test-reference: $(REFERENCE)/installed.stamp ## the model against transformers, computed anew
	REFERENCE_PYTHON=$(REFERENCE)/bin/python $(PYTEST) -m reference

test-all: $(TPU)/installed.stamp $(REFERENCE)/installed.stamp ## all tests
	PYTHONPATH=$(TPU) REFERENCE_PYTHON=$(REFERENCE)/bin/python $(PYTEST) -m ""

lint: $(STAMP) ## linter, formatter check, type checker
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP) ## format the code and mend what the linter can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove what make built; runs/ stays
	rm -rf $(VENV) build

$(TOOLS)/bin/uv:
	@echo "installing uv into $(TOOLS)"
	@python3 -m pip install --quiet --target $(TOOLS) uv || { \
	  echo "error: set-up needs uv, or pip for python3 to install it: put either on this machine"; \
	  exit 1; }

# The extra `tpu`, beside the environment: inside it, JAX would look for a TPU in every command.
$(TPU)/installed.stamp: $(STAMP)
	$(UV) pip install --python $(BIN)/python --target $(TPU) --no-deps libtpu \
	  --constraints constraints.txt
	@touch $@

# An environment of its own, which tests only start. By pip: where a build of torch without CUDA
# is at hand (0.9 GB installed instead of 5), pip takes it.
$(REFERENCE)/installed.stamp: tests/reference-requirements.txt
	$(shell command -v python3.11 || command -v python3) -m venv --clear $(REFERENCE)
	$(REFERENCE)/bin/pip install --quiet --requirement tests/reference-requirements.txt
	@touch $@

# The Python that .python-version names, else any that is new enough, else one that uv can fetch.
$(STAMP): pyproject.toml constraints.txt $(filter $(TOOLS)/%,$(UV))
	@if ! $(BIN)/python -c 'import sys' 2>/dev/null; then \
	  $(UV) venv --clear --no-python-downloads --python $(PYTHON) $(VENV) 2>/dev/null \
	  || $(UV) venv --clear --no-python-downloads --python '>=3.12' $(VENV) 2>/dev/null \
	  || $(UV) venv --clear --python $(PYTHON) $(VENV) \
	  || { echo "error: octablox needs Python $(PYTHON) or newer, and none was found"; exit 1; }; \
	fi
	$(UV) pip install --python $(BIN)/python --editable '.[test]' --constraints constraints.txt \
	  --compile-bytecode
	@touch $@
