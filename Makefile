# make demo   set everything up and profile the example
# make test   set everything up and run all checks
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TYPES := build/types

.PHONY: setup demo test lint bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/gradscope profile examples/gpt.py --force

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy cannot see through the editable install: recipes and kernels are linked to where they import from.
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/gradscope
	@ln -s "$(CURDIR)"/gradscope/* "$(CURDIR)/recipes" "$(CURDIR)/kernels" $(TYPES)/gradscope/
	MYPYPATH=$(TYPES) $(BIN)/mypy -p gradscope

test: lint
	$(BIN)/python -m pytest

bench: setup
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/analysis.py
	$(BIN)/python benchmarks/truth_table.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/responsiveness.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
