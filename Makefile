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

.PHONY: demo test campaign recipes chaos faults coverage check bench gpu gpu-wheels clean

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

# The examples' scripts for schedulers, on real ones; those that are not installed are named at the end.
recipes: JOBS = 2
recipes: $(VENV)/ready
	$(PYTEST) -m recipes -rs

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
	@$(PYTHON) benchmarks/$(NAME).py $(if $(ROWS),--rows $(ROWS)) $(if $(RECONFIGURATIONS),--reconfigurations $(RECONFIGURATIONS)) $(if $(ALL),--all) $(if $(DATA),--data $(DATA))

# On a machine with a CUDA device, by the Python that has its torch: the tests and figures of devices.
gpu: PYTHON = python3
gpu:
	MEGATRON_LM_PATH=$${MEGATRON_LM_PATH-$(CURDIR)/build/gpu/Megatron-LM} $(PYTHON) benchmarks/gpu.py $(if $(PARTS),--only $(PARTS))

# All that such a machine without a network lacks beside torch, into build/gpu: wheels for its Python,
# and the checkout that MEGATRON_LM_PATH names.
GPU_PYTHON ?= 3.12
GPU_WHEELS := megatron-core==0.16.1 msgspec wrapt cryptography cffi pycparser pydantic pydantic_core annotated-types \
  typing-inspection typing_extensions hjson
gpu-wheels: $(VENV)/ready
	rm -rf build/gpu build/lib
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir build/gpu/wheels .
	$(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --no-binary deepspeed --wheel-dir build/gpu/wheels deepspeed
	$(PYTHON) -m pip download --quiet --no-deps --only-binary :all: --implementation cp --python-version $(GPU_PYTHON) \
	  $(foreach libc,2_28 2_24 2_17,--platform manylinux_$(libc)_x86_64) --platform manylinux2014_x86_64 \
	  --dest build/gpu/wheels $(GPU_WHEELS)
	$(if $(MEGATRON_LM_PATH),mkdir build/gpu/Megatron-LM && cp -r $(addprefix $(MEGATRON_LM_PATH)/,megatron \
	  pretrain_gpt.py gpt_builders.py model_provider.py) build/gpu/Megatron-LM && \
	  unzip -q build/gpu/wheels/megatron_core*.whl '*/helpers_cpp*' -d build/gpu/Megatron-LM)

clean:
	rm -rf $(VENV) build *.egg-info

# torch is pinned, because a plain install of it takes gigabytes of CUDA libraries on a machine without CUDA.
$(VENV)/ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --upgrade pip
	$(PYTHON) -m pip install --quiet --constraint constraints.txt torch
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[megatron,deepspeed,trainers,slabs,vfs,metrics,plot,trackers,dev]'
	touch $@
