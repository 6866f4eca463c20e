# make demo   set up and run the main job on procedural scenes        make test   set up, lint, type-check, pass the quick tests
# make dist   wheel and sdist in dist/, tried in a fresh environment
# make docs   these pages as a site in site/, every link checked
# make prove  the longer checks, the quick benchmarks, make docs and make dist
# make prove-long   what takes hours: all settings of the second opinion, audits, LiRA, crashes, hostile files, memorisation
# make mutants   every planted mistake and repeated attack as a table
# make gpu-rehearsal   the acceptance of a GPU machine, on this CPU, with that machine's packages and the wheels to carry there
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export MPLBACKEND := Agg
# Where it is set, every process of the tests compiles all that it imports: six of torch's twelve seconds on a slow core.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test check prove prove-long mutants gpu-rehearsal docs dist clean

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

# The tests are compiled (pytest's rewriting of 430 files) beside the type checker, which uses one core.
test: setup
	$(BIN)/pytest --collect-only -qq > /dev/null & $(MAKE) check; status=$$?; wait; exit $$status
	$(BIN)/pytest -n 2 --dist worksteal

prove: setup
	$(BIN)/pytest -n 2 --dist worksteal -m "not gpu"
	mkdir -p runs/bench
	$(BIN)/python benchmarks/draws.py --json runs/bench/draws.json
	$(BIN)/python benchmarks/store_reads.py --quick --json runs/bench/store_reads.json
	$(BIN)/python benchmarks/import_rate.py --quick --json runs/bench/import_rate.json
	$(BIN)/python benchmarks/merge_stores.py --quick --json runs/bench/merge_stores.json
	$(BIN)/python benchmarks/loader.py --quick --json runs/bench/loader.json
	$(BIN)/python benchmarks/step.py --small --models mae_micro --json runs/bench/step.json
	$(BIN)/python benchmarks/clipping.py --quick --json runs/bench/clipping.json
	$(MAKE) docs dist

mutants: setup
	mkdir -p runs/bench
	$(BIN)/python benchmarks/mutants.py --json runs/bench/mutants.json

# make -k -j2 prove-long: two at a time, and the others too after one that fails.
LONG := $(addprefix long-,second_opinion audits black_box lira crashes hostile_files memorisation)
prove-long: $(LONG)

$(LONG): runs/bench

runs/bench:
	mkdir -p $@

# From the start, not on from results of other code.
long-black_box: setup
	$(BIN)/python benchmarks/audits.py --black-box --json runs/bench/audits_black_box.json

long-crashes: setup
	rm -rf runs/bench/crashes
	$(BIN)/python benchmarks/crashes.py --work runs/bench/crashes --points 40 --full --others --json runs/bench/crashes.json

long-memorisation: setup
	rm -rf runs/bench/memorisation
	$(BIN)/python benchmarks/memorisation.py --work runs/bench/memorisation --json runs/bench/memorisation.json

long-%: setup
	rm -f runs/bench/$*.json
	$(BIN)/python benchmarks/$*.py --json runs/bench/$*.json

gpu-rehearsal: setup
	scripts/gpu_rehearsal.sh $(PYTHON)

dist: setup
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist .
	$(BIN)/uv venv --quiet --clear dist/env
	$(BIN)/uv pip install --quiet --python dist/env/bin/python twine dist/*.whl
	dist/env/bin/twine check dist/*.whl dist/*.tar.gz
	cd dist && env/bin/dpvision data scenes scenes --num 500 --size-px 32 \
	  && env/bin/dpvision adapt --data scenes --num-classes 8 --dataset-size 500 --epsilon 8 --name wheel \
	  && env/bin/dpvision report runs/wheel && env/bin/dpvision verify runs/wheel/statement.json --run runs/wheel --store scenes

docs: setup
	$(BIN)/uv tool run --quiet --from 'zensical>=0.0.73,<0.1' --with 'mkdocstrings-python>=2,<3' zensical build --strict --clean

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
