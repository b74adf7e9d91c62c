# Two commands on a fresh machine do everything: `make demo` and `make test`. Each makes .venv if it is not there.
VENV := .venv
PYTHON := $(VENV)/bin/python
BENCHMARKS := $(basename $(notdir $(wildcard benchmarks/*.py)))
# Processes of pytest that share the tests of a run (docs/testing.md).
JOBS ?= 4
PYTEST = $(PYTHON) -m pytest -n $(JOBS) --durations=20
export OMP_NUM_THREADS := 1
# Hundreds of processes import the same modules: they are compiled once.
unexport PYTHONDONTWRITEBYTECODE
export DS_BUILD_OPS := 0
# What torch compiles for DeepSpeed: a build that was killed elsewhere leaves a lock that all wait for.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/build/torch_extensions

.PHONY: demo test campaign chaos faults coverage check bench clean

demo: $(VENV)/ready
	$(PYTHON) examples/demo.py $(if $(FRAMEWORK),--framework $(FRAMEWORK)) \
	  $(if $(DATA_VIEW),--data-view $(DATA_VIEW)) $(if $(DATA),--data $(DATA))

test: check
	$(PYTEST)

# The full cross of layouts, and every supported megatron-core version: one turn of four (docs/testing.md),
# or with ALL=1 all of them.
# Its jobs have up to four workers with a framework each.
campaign: JOBS = 2
campaign: $(VENV)/ready
	$(if $(ALL),TURN=all) $(PYTEST) -m campaign

# Faults of every kind against a tiny job, beside a run that nobody interrupts; its last line is JSON.
chaos: $(VENV)/ready
	@PYTHONPATH=tests $(PYTHON) -m support.chaos_campaign $(if $(SEED),--seed $(SEED)) $(if $(PARTS),--parts $(PARTS))

# Which tests prove what comes of which fault, from the mark on the tests.
faults: $(VENV)/ready
	@PYTHONPATH=tests $(PYTHON) -m support.faults

# Which lines and branches the tests of the default run reach, in all of their processes.
coverage: $(VENV)/ready
	rm -rf build/coverage
	mkdir -p build/coverage
	$(PYTHON) -m coverage run -m pytest -n $(JOBS) $(PYTEST_ARGUMENTS); status=$$?; \
	$(PYTHON) -m coverage combine --quiet && $(PYTHON) -m coverage report && exit $$status

check: $(VENV)/ready
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check --quiet .
	$(PYTHON) tests/link_tree.py
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy tests benchmarks examples

bench: $(VENV)/ready
	@test -f benchmarks/$(NAME).py || { echo "make bench NAME=x, where x is one of: $(BENCHMARKS)" >&2; exit 2; }
	@$(PYTHON) benchmarks/$(NAME).py $(if $(ROWS),--rows $(ROWS)) $(if $(RECONFIGURATIONS),--reconfigurations $(RECONFIGURATIONS))

clean:
	rm -rf $(VENV) build *.egg-info

# torch is pinned, because a plain install of it takes gigabytes of CUDA libraries on a machine without CUDA.
$(VENV)/ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --upgrade pip
	$(PYTHON) -m pip install --quiet --constraint constraints.txt torch
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[megatron,deepspeed,trainers,slabs,vfs,dev]'
	touch $@
