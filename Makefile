# One environment, .venv, made once: a second call sets up nothing again. NIXL's metadata asks for torch, which
# nothing here uses, so it is installed without what it asks for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/quickstart.py

# PyTorch for `benchmarks/rivals`, in an environment of its own. The wheel with CUDA brings some GB of libraries.
RIVALS := .venv-rivals
TORCH ?= torch==2.13.0+cpu

# SpectraX (AGPL) in another one, with the versions of JAX, flax and optax that are in .venv.
SPECTRAX := .venv-spectrax

# What one runs while working: the core, the simulator, and one Trainer in this process; no other processes.
FAST := tests/core tests/sim tests/forecast tests/house/test_layering.py \
	tests/data/test_buckets.py tests/data/test_sources.py tests/data/test_byte_text.py \
	$(addprefix tests/report/test_,store.py perfetto.py pictures.py) \
	$(addprefix tests/runtime/test_,mailbox.py handshake.py groups.py readiness.py memory.py) \
	$(addprefix tests/train/test_,trainer.py refusals.py)

# The files with tests about optimized programs: a second pytest need not collect all others.
OPTIMIZED := $(addprefix tests/,runtime/test_split.py runtime/test_adding.py train/test_exactness.py \
	train/test_equal_schedules.py)

.PHONY: train test test-all test-slurm test-fast test-durations golden odd-models other-models newest gpu-compile lint format docs docs-serve rivals clean

train: $(VENV)/.train
	$(BIN)/rrfp launch --config=$(CONFIG) $(ARGS)

# Every feature, within minutes: without slow tests and most cases of others; `python -m tests.support.quick` lists them.
test: $(VENV)/.installed
	$(MAKE) test-all ARGS="-p tests.support.quick --quick $(ARGS)"

# Three workers for two cores, as some tests wait and not compute.
test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not optimized" $(ARGS)
	RRFP_TEST_OPTIMIZED=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m optimized $(OPTIMIZED) $(ARGS)

test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile $(FAST) $(ARGS)

# Runs under SLURM over isolated nodes, as root: crashed nodes, SIGTERM, the time limit. Some minutes; not part of
# the others, as it needs SLURM. On a busy machine: RRFP_TEST_SLURM_SECONDS=150 make test-slurm
test-slurm: $(VENV)/.installed
	{ command -v slurmctld && command -v munged; } >/dev/null || apt-get install -y slurm-wlm munge
	RRFP_TEST_SLURM=1 $(BIN)/python -m pytest -s tests/nodes/test_slurm.py $(ARGS)

# Every odd model, on 1, 2 and 4 stages, with and without rematerialisation; `make test-all` runs a part of that. Last
# 320 models of layers, modules and transforms of flax; a summary of what came of them.
odd-models: $(VENV)/.installed
	RRFP_ODD_MODELS=all $(BIN)/python -m pytest -n 2 --dist worksteal tests/odd_models $(ARGS)
	$(BIN)/python -m tests.odd_models.corpus

# What each test takes of clock and CPU: .pytest_cache/durations.json, those that take most, and those of over 5 s
# that are marked neither slow nor costly.
test-durations: $(VENV)/.installed
	$(MAKE) test-all ARGS="-p tests.support.durations --durations-file=.pytest_cache/durations.json $(ARGS)"
	$(BIN)/python -m tests.support.durations .pytest_cache/durations.json

# What this checkout does beside an older commit: make golden ARGS="--old=main" (tests/golden/README.md).
golden: $(VENV)/.installed
	$(BIN)/python -m tests.golden $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Tests that need XLA's compiler for GPUs (2.4 GB of packages, no GPU), in an environment of its own.
gpu-compile: .venv-gpu/.installed
	.venv-gpu/bin/python -m pytest tests/commands/test_compile.py $(ARGS)

# Four stages against plain JAX with the newest jax, on Python 3.12 or newer if one is at hand (NEWER=python3.13):
# PYTHON may be too old for it.
NEWER ?= $(shell for python in python3.14 python3.13 python3.12 $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python; do \
	$$python -c pass 2>/dev/null && echo $$python && break; done)

newest:
ifeq ($(NEWER),)
	@echo 'newest: skipped, there is no Python 3.12 or newer here'
else
	$(NEWER) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -U jax flax optax chex absl-py msgspec
	.venv-newest/bin/python -m benchmarks gpu --quick --out=.venv-newest/check --parts=2 --check
endif

# Models that other people wrote, from packages in an environment of its own (1 GB, most of it what the project needs).
other-models: .venv-models/.installed
	RRFP_OTHER_MODELS=all .venv-models/bin/python -m pytest -W ignore tests/other_models $(ARGS)
	RRFP_OTHER_MODELS=all .venv-models/bin/python -m pytest -W ignore tests/docs/test_blocks.py -k other-models

# The documentation as a site: site/index.html. A warning fails it.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

docs-serve: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve $(ARGS)

rivals: $(SPECTRAX)/.installed $(RIVALS)/.installed

clean:
	rm -rf $(VENV) $(RIVALS) $(SPECTRAX) .venv-gpu .venv-models .venv-newest build site *.egg-info

.venv-gpu/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cuda12]' pytest
	touch $@

.venv-models/.installed: pyproject.toml tests/other_models/requirements.txt
	$(PYTHON) -m venv .venv-models
	.venv-models/bin/python -m pip install --quiet --disable-pip-version-check -e . pytest
	.venv-models/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/other_models/requirements.txt
	touch $@

# What `make train` needs, and no more. Nobody waits until pip has compiled all modules of all packages, as that
# takes longer than all else here: those that are imported are compiled now, once for all ranks.
$(VENV)/.train: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rrfp_jax needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e .
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import rrfp_jax.commands.overrides, rrfp_jax.runs.run'
	touch $@

# What tests, lint and docs need, too.
$(VENV)/.installed: $(VENV)/.train
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'nixl-cu12>=1.5,<2'
	touch $@

$(RIVALS)/.installed:
	$(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/python -m pip install --quiet --disable-pip-version-check numpy '$(TORCH)' || { echo \
		'rivals: skipped, pip finds no $(TORCH): name an index that has it in PIP_EXTRA_INDEX_URL, or take' \
		'the default wheel: make rivals TORCH=torch' >&2; exit 1; }
	touch $@

$(SPECTRAX)/.installed: | $(VENV)/.train
	$(PYTHON) -m venv $(SPECTRAX)
	$(BIN)/python -m pip list --format=freeze | grep -E '^(jax|jaxlib|flax|optax|numpy)=' >$(SPECTRAX)/same.txt
	$(SPECTRAX)/bin/python -m pip install --quiet --disable-pip-version-check -c $(SPECTRAX)/same.txt -e . spectrax-lib==0.1.4
	touch $@
