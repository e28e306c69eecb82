# One environment, in .venv, updated when what it depends on changes. Commands that people type:
#   make quickstart   a first training run, set-up included
#   make agent        the same with an agent that speaks OpenAI's protocol
#   make test         the tests but the slow ones, set-up included
# PYTHON names the interpreter that .venv is made from; VENV puts the environment elsewhere.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Small models run fastest with one thread a process: the processes are the parallelism.
export OMP_NUM_THREADS ?= 1

.PHONY: help env docs recipes quickstart agent test test-all test-processors test-newer sglang-env test-sglang verifiers-env test-verifiers test-megatron test-harnesses test-gpu campaign test-times golden golden-record bench bench-trl bench-vocabulary bench-memory bench-schedules bench-algorithms lint format format-check types imports unused-names wheel ci clean

help:
	@echo "make quickstart   train a small model on a small task and show what it learned"
	@echo "make agent        train an agent that uses OpenAI's client, from random weights, and show what it learned"
	@echo "make test         run the tests but the slow ones, in minutes (PYTEST_ARGS='-k name' to choose)"
	@echo "make test-all     run all tests"
	@echo "make test-processors  run the numerical tests as on processors without AVX-512 and without AVX"
	@echo "make test-newer   run the numerical tests with torch 2.14.1 and 2.15.0 and transformers 5.24; installs them in environments of their own (11 GB)"
	@echo "make test-sglang  run the tests against real SGLang servers on the CPU; installs them in $(VENV)-sglang (1.6 GB)"
	@echo "make test-verifiers  run the tests against real tasksets of verifiers; installs it in $(VENV)-verifiers (0.6 GB)"
	@echo "make test-megatron  run the tests of all layouts of Megatron ranks on the CPU"
	@echo "make test-harnesses  run agent programs of others, unchanged, over a session; installs them in a temporary folder"
	@echo "make test-gpu     everything that one GPU can show, and a table of it (ARGS='--dry-run': without one)"
	@echo "make recipes      settings with the curve to expect: trains and compares those that need no GPU (5 minutes)"
	@echo "make docs         the documentation site, in build/site"
	@echo "make campaign     long fault campaigns (an hour); writes docs/evidence/campaigns.md"
	@echo "make test-times   run tests and say where their time went (PYTEST_ARGS='tests/unit/algo')"
	@echo "make golden-record  note what the golden runs end with, before code is moved; make golden compares"
	@echo "make lint         format check, ruff, mypy --strict, import rules, unused names"
	@echo "make format       reformat and apply ruff's safe fixes"
	@echo "make bench        a step by phase, by process and by part, and the engine against transformers"
	@echo "make bench-trl    step time and seconds to the same accuracy against TRL (ARGS='--quick': two minutes)"
	@echo "make bench-vocabulary  trained tokens a second and memory at a large vocabulary, against TRL"
	@echo "make bench-memory  memory of a trainer rank by the number of ranks that a model is split over"
	@echo "make bench-schedules  step time under each schedule"
	@echo "make bench-algorithms  whether each algorithm learns (half an hour); writes table and picture in docs/"
	@echo "make wheel        build the distribution into dist/"
	@echo "make ci           what continuous integration runs"
	@echo "make clean        remove the environment and everything that was built"

# Two stamps: the quickstart need not wait for development tools.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "buffer-rl needs Python 3.11 or newer; " \
	  "this is %d.%d at %s. Name another one: make PYTHON=python3.11 ..." % (*sys.version_info[:2], sys.executable))'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-examples: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[examples]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.stamp-examples

quickstart: $(VENV)/.stamp-examples
	$(BIN)/python examples/quickstart/run.py $(ARGS)

agent: $(VENV)/.stamp-examples
	$(BIN)/python examples/agent/run.py $(ARGS)

env: $(VENV)/.stamp-dev

test: $(VENV)/.stamp-dev
	$(BIN)/python tests/run.py $(PYTEST_ARGS)

test-all: $(VENV)/.stamp-dev
	$(BIN)/python tests/run.py --all $(PYTEST_ARGS)

# Twice, each with the kernels of another processor.
test-processors: $(VENV)/.stamp-dev
	$(BIN)/python tests/run.py --all --processors $(PYTEST_ARGS)

.PRECIOUS: $(VENV)-torch-%/.stamp
# With newer packages than the pinned ones, each torch in an environment of its own (5.5 GB: a build for CUDA).
$(VENV)-torch-%/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -v -e '^torch==' -e '^transformers==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -c $(@D)/constraints.txt -e '.[dev]' torch==$* transformers==5.24.0
	@touch $@

test-torch-%: $(VENV)-torch-%/.stamp
	$(VENV)-torch-$*/bin/python tests/run.py --all --processors $(PYTEST_ARGS)

test-newer: test-torch-2.14.1 test-torch-2.15.0

# Real servers, in an environment of their own (1.6 GB).
$(VENV)-sglang/.stamp: plugins/buffer_rl_sglang/requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)-sglang
	$(VENV)-sglang/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
	$(VENV)-sglang/bin/python -m pip install -q --disable-pip-version-check --no-deps sglang==0.5.23
	$(VENV)-sglang/bin/python -m pip install -q --disable-pip-version-check -r $<
	$(VENV)-sglang/bin/python -m pip uninstall -q -y triton
	@touch $@

sglang-env: $(VENV)-sglang/.stamp

test-sglang: $(VENV)/.stamp-dev $(VENV)-sglang/.stamp
	SGLANG_PYTHON=$(CURDIR)/$(VENV)-sglang/bin/python $(BIN)/python -m pytest -m sglang $(PYTEST_ARGS)

# verifiers, in an environment of its own (0.6 GB): it wants another version of openai.
$(VENV)-verifiers/.stamp: plugins/buffer_rl_verifiers/requirements.txt
	$(PYTHON) -m venv $(VENV)-verifiers
	$(VENV)-verifiers/bin/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@

verifiers-env: $(VENV)-verifiers/.stamp

test-verifiers: $(VENV)/.stamp-dev $(VENV)-verifiers/.stamp
	VERIFIERS_PYTHON=$(CURDIR)/$(VENV)-verifiers/bin/python $(BIN)/python -m pytest -m verifiers $(PYTEST_ARGS)

# Every layout of ranks that a CPU can run; a sample is among the other tests.
test-megatron: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m megatron $(PYTEST_ARGS)

# Agent programs of others, unchanged; installs them in a temporary folder (0.9 GB).
test-harnesses: $(VENV)/.stamp-dev
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python benchmarks/harnesses.py $(ARGS)

# With the Python that has torch for the GPU: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	PYTHONPATH=$(CURDIR):$(CURDIR)/plugins:$(CURDIR)/tests $(GPU_PYTHON) benchmarks/gpu.py $(ARGS)

campaign: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m campaign
	$(BIN)/python benchmarks/campaign.py $(ARGS)

test-times: $(VENV)/.stamp-dev
	$(BIN)/python tests/session_times/report.py $(PYTEST_ARGS)

golden-record: $(VENV)/.stamp-dev
	$(BIN)/python tests/golden/runs.py record

golden: $(VENV)/.stamp-dev
	$(BIN)/python tests/golden/runs.py compare

bench: $(VENV)/.stamp-dev
	$(BIN)/python benchmarks/run.py

$(VENV)/.stamp-bench: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-dev
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
docs: $(VENV)/.stamp-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html; with its search: $(BIN)/mkdocs serve"

recipes: $(VENV)/.stamp-examples
	$(BIN)/python examples/recipes/run.py $(ARGS)

bench-trl: $(VENV)/.stamp-bench
	$(BIN)/python benchmarks/against_trl.py $(ARGS)

bench-vocabulary: $(VENV)/.stamp-bench
	$(BIN)/python benchmarks/vocabulary.py $(ARGS)

bench-memory: $(VENV)/.stamp-dev
	$(BIN)/python benchmarks/memory.py $(ARGS)

bench-schedules: $(VENV)/.stamp-dev
	$(BIN)/python benchmarks/schedules.py
	$(BIN)/python benchmarks/schedule_step.py

bench-algorithms: $(VENV)/.stamp-examples
	$(BIN)/python benchmarks/algorithms.py --write $(ARGS)

lint: format-check types imports unused-names

format-check: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.stamp-dev
	$(BIN)/mypy

imports: $(VENV)/.stamp-dev
	$(BIN)/lint-imports

unused-names: $(VENV)/.stamp-dev
	$(BIN)/python tests/unused_names.py

format: $(VENV)/.stamp-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(VENV)/.stamp-dev
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist

ci:
	.ci/run

clean:
	rm -rf $(VENV) $(VENV)-sglang $(VENV)-verifiers dist build examples/*/build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
