# Every target sets up what it needs: a virtual environment in .venv, torch, the package with its extras.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The CPU build of this release serves every target; the package itself accepts a range that contains it.
TORCH ?= torch==2.13.0

.PHONY: demo test test-slow test-native lint types bench clean

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo,dev]'
	touch $@

demo: $(READY)  ## a continuation by a real model, with its latency
	$(BIN)/ridgeline generate gemma3-270m --prompt "The lighthouse keeper opened the door and" --max-tokens 48 --temperature 0 --stream

test: $(READY)  ## the default suite, in under five minutes on two cores
	$(BIN)/python -m pytest -n auto

test-slow: $(READY)  ## the tests that need minutes
	$(BIN)/python -m pytest -m slow -n auto

test-native: $(READY)  ## the C++ kernels against plain loops, with address and undefined-behaviour sanitizers
	$(BIN)/cmake -S . -B build/native-tests -DRIDGELINE_TESTS=ON
	$(BIN)/cmake --build build/native-tests --parallel
	$(BIN)/ctest --test-dir build/native-tests --output-on-failure --parallel 2

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)  ## continuous against static batching
	$(BIN)/python -m benchmarks.batching

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
