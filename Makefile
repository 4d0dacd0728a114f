# Two targets do all the set-up: `make demo` and `make test`. Both work in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

# Two workers of one thread each: on 2 cores faster than one of two, and the same figures on any machine.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo test slow lint bench table clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -m "not slow"

# What takes long: the real SmolLM2, every compiler, the whole table of families. CI runs these after `make test`.
slow: $(VENV)/.installed-test
	$(PYTEST) -m slow

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/overhead.py

table: $(VENV)/.installed
	$(BIN)/python examples/strategy_table.py --write docs/strategies.md

# torch by its exact pin first: an open range would fetch a CUDA build of several GB.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "graphquant needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.torch pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info model.pt2 .mypy_cache .ruff_cache .pytest_cache .hypothesis
