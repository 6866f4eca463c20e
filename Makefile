# make demo   set up and run the main job on procedural scenes        make test   set up, lint, type-check, pass the tests
# make prove  the longer checks and the quick benchmarks
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export MPLBACKEND := Agg

.PHONY: setup demo test check prove clean

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dpvision needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

demo: setup
	$(BIN)/dpvision demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/pytest -n 2

prove: setup
	$(BIN)/pytest -n 2 -m "not gpu"
	mkdir -p runs/bench
	$(BIN)/python benchmarks/draws.py --json runs/bench/draws.json
	$(BIN)/python benchmarks/store_reads.py --quick --json runs/bench/store_reads.json
	$(BIN)/python benchmarks/clipping.py --quick --json runs/bench/clipping.json

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
