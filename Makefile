# The environment is made once, in .venv; `make PYTHON=python3.12 test` picks another Python (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint type unit long golden zoo parity meshes collectives clean

demo: $(VENV)/stamp
	$(BIN)/python examples/demo.py

test: lint type unit

lint: $(VENV)/stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/stamp
	$(BIN)/mypy

unit: $(VENV)/stamp
	$(BIN)/pytest -n 2 --dist loadfile -m "not long"

# further rows of the tables whose first ones `make test` runs: more meshes, models, optimizers
long: $(VENV)/stamp
	$(BIN)/pytest -n 2 --dist loadfile -m long

# rewrite the texts in tests/golden, to be reviewed as a diff
golden: $(VENV)/stamp
	ACCEPT_GOLDEN=1 $(BIN)/pytest -k golden

# plan and prove every transformers type that can be built tiny: about an hour; a broken run goes on where it stopped
zoo: $(VENV)/stamp
	$(BIN)/python benchmarks/zoo.py --write

# plan and prove well-known architectures at tp=2 and tp=4: some minutes; a broken run goes on where it stopped
parity: $(VENV)/stamp
	$(BIN)/python benchmarks/parity.py --write

# choose a mesh for every published configuration: some minutes; a broken run goes on where it stopped
meshes: $(VENV)/stamp
	$(BIN)/python benchmarks/published.py --write

# count the collectives of a step by axis, on the fake process group, against the plan's: some minutes
collectives: $(VENV)/stamp
	$(BIN)/python benchmarks/collectives.py --write

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch first: it decides the versions of what the rest shares with it
$(VENV)/stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@
