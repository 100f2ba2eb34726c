# make demo   set everything up and profile the example
# make test   set everything up and run all checks
# make peers   fetch other kernel libraries' tests into build/peers and run them on the recipes (10 GB of memory)
# make test-torch VERSION=2.15.0 [PYTHON=python3.13]   the tests with another torch, in an environment of its own
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TYPES := build/types
# Tools that check the page's script; gradscope itself needs no node, and without npm these checks are left out.
WEB := gradscope/report/page/web
TOOLS := build/web

.PHONY: setup demo test test-torch peers lint web browser bench clean

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

# The truth suite compares with clocks: it runs alone. The rest shares two processes, a file in one of them.
test: lint web browser
	@# Where the environment keeps bytecode from being written, each program that a test starts would compile it anew.
	@$(BIN)/python -m compileall -q gradscope recipes kernels
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore=tests/truth
	$(BIN)/python -m pytest tests/truth

# Prints a row of docs/versions.md at the end, also where tests fail.
test-torch: browser
	@set -e; env=$$($(PYTHON) tests/versions/environment.py $(VERSION)); failed=0; \
	"$$env/bin/python" -m pytest -n 2 --dist loadfile --ignore=tests/truth --junitxml "$$env/tests.xml" || failed=1; \
	"$$env/bin/python" -m pytest tests/truth --junitxml "$$env/truth.xml" || failed=1; \
	"$$env/bin/python" tests/versions/row.py "$$env/tests.xml" "$$env/truth.xml"; exit $$failed

# `make test` runs them too where they were fetched, but for tensors of more than 50 million elements.
peers: setup
	$(BIN)/python tests/peers/fetch.py
	GRADSCOPE_PEERS_LARGE=1 $(BIN)/python -m pytest tests/peers

$(TOOLS)/.ready: $(WEB)/package.json $(WEB)/package-lock.json
	mkdir -p $(TOOLS) && cp $^ $(TOOLS)/
	npm ci --prefix $(TOOLS) --no-audit --no-fund --silent
	touch $@

web:
	@if command -v npm > /dev/null; then $(MAKE) --no-print-directory web-checks; \
	else echo "npm is not installed: the page's script is not checked"; test "$(CI)" != true; fi

.PHONY: web-checks
web-checks: $(TOOLS)/.ready
	$(TOOLS)/node_modules/.bin/prettier --config $(WEB)/package.json --check $(WEB)/src/*.js $(WEB)/src/*.css $(WEB)/*.js tests/page/unit
	$(TOOLS)/node_modules/.bin/tsc -p $(WEB)
	cd $(WEB) && "$(CURDIR)/$(TOOLS)/node_modules/.bin/eslint" -c eslint.config.js src
	node --test tests/page/unit/*.test.mjs

# Elsewhere than as root on a system with apt, the tests in a browser are skipped unless there is a chromium.
browser: setup
	@command -v chromium > /dev/null || test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null || \
	(apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)

bench: setup
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/analysis.py
	$(BIN)/python benchmarks/huge_steps.py
	$(BIN)/python benchmarks/truth_table.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/responsiveness.py
	$(BIN)/python benchmarks/recipes.py
	@if command -v chromium > /dev/null; then $(BIN)/python benchmarks/page.py; \
	else echo "chromium is not installed: the page is not measured"; fi

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
