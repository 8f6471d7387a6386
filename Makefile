# Works on a fresh clone with nothing but Python 3.11 and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Nothing that these import is of the planner's alone.
GPU_TESTS := tests/gpu tests/benchmarks/gpu/test_cuda.py tests/executor/test_every_executor.py tests/lowering/test_several.py tests/lowering/test_pools.py

# Nothing that these import is torch's or the planner's.
EDGE_TESTS := tests/agent tests/lifecycle tests/worker tests/executor

# Of the plugins that others bring; loading all of them at every start takes longer than many a test file.
PLUGINS := --disable-plugin-autoload -p xdist.plugin -p pytest_timeout -p _hypothesis_pytestplugin

# One more than cores: some tests wait for processes and clocks.
WORKERS := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))

# Real processes beside thousands of other tests on two cores: what failed is printed, then tried once more, alone.
# What fails twice fails; what passed alone is a race to be mended, named by the first run's summary.
# Only exit code 1 is that: after any other (an internal error, no memory) most tests never ran.
ALONE := --last-failed --last-failed-no-failures none

USUAL := not full and not more and not gpu
MORE := more and not full and not gpu

.PHONY: help setup demo test test-more test-edge test-docs test-api test-full test-gpu lint types imports spell house check docs deb clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing; install Python 3.11 or later" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[planner,learn,edge,onnx,dev]'
	$(BIN)/python -c 'from stageloom.planner.twin.compiled import compile_ahead; compile_ahead()'
	@touch $@

setup: $(VENV)/.installed ## Build .venv with everything that demo and tests need

demo: setup ## Planner, agent and three clients on this machine; the report lands in var/demo/
	$(BIN)/python -m examples.demo

test: setup ## The test suite, some ten minutes on 2 cores
	$(BIN)/python -m pytest $(PLUGINS) -n $(WORKERS) --dist loadfile -m '$(USUAL)' || \
		{ [ $$? -eq 1 ] && $(BIN)/python -m pytest $(PLUGINS) $(ALONE) -m '$(USUAL)'; }

test-more: setup ## What it leaves out: floods, power cuts, full disks, statistics, killed planners, planted defects, trainings as commands
	$(BIN)/python -m pytest $(PLUGINS) -n $(WORKERS) --dist loadfile -m '$(MORE)' || \
		{ [ $$? -eq 1 ] && $(BIN)/python -m pytest $(PLUGINS) $(ALONE) -m '$(MORE)'; }

$(VENV)-edge/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-edge
	$(VENV)-edge/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[edge,onnx]' pytest pytest-timeout hypothesis
	@touch $@

test-edge: $(VENV)-edge/.installed ## The agent's tests where nothing of the planner is installed
	$(VENV)-edge/bin/python -m pytest -m 'not full and not gpu' $(EDGE_TESTS) || \
		{ [ $$? -eq 1 ] && $(VENV)-edge/bin/python -m pytest $(ALONE) -m 'not full and not gpu' $(EDGE_TESTS); }

test-docs: setup docs ## The site, the tutorial command by command, the examples
	$(BIN)/python -m pytest -m full tests/docs

test-api: setup ## The API before a stranger's judge, schemathesis, with a token of each role
	$(BIN)/python -m pytest -m full tests/planner/api/test_schemathesis.py

$(VENV)/.full: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev-full]'
	@touch $@

test-full: $(VENV)/.full ## Everything: full-size models and long scenarios
	$(BIN)/python -m pytest -n auto --dist loadfile --hypothesis-profile=default -m 'not gpu'

test-gpu: ## What needs a CUDA device; PYTHON has torch, onnx, onnxruntime, msgspec, msgpack, pytest, pytest-timeout and hypothesis
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(GPU_TESTS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

spell: setup
	$(BIN)/codespell

house: setup ## Counts of the product; names that occur twice, import circles
	$(BIN)/python tools/house.py --check

docs: setup ## The documentation as a site, in var/site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

deb: setup ## The agent as a Debian package, in var/deb/
	$(BIN)/python -m deploy.deb

check: lint types imports spell house ## Format, types, import contracts, spelling, the house

clean: ## Remove both environments and everything under var/
	rm -rf $(VENV) $(VENV)-edge var
