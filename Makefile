# Everything runs in a virtual environment made from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where the CPU build of torch is, for a pip whose own sources do not have it.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
# The judges and `make test-all` take a share: `make judges SHARE=10 SEED=7` is a tenth of each, drawn by 7; the seeds 0 to 9, or 10 to 19, are the whole.
SHARE ?= 1
SEED ?= 0
DRAWN := $(if $(filter-out 1,$(SHARE)),--share $(SHARE) --seed $(SEED))
# One more than the cores of the smallest machine: tests of real processes often wait.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile
# Processes that tests start compile nothing again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: gates quick test test-all docs demo bench release gpu judge judges exhaustive ep pp steps soundness adversaries mutants zoo variants two-writers faults

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a minute or two)"
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) || $(INSTALL) --extra-index-url $(TORCH_CPU_INDEX)
	@touch $@

gates: $(VENV)/.installed  ## what is seen without running anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/sizes.py

quick: $(VENV)/.installed  ## the tests that need no torch (tests/conftest.py lists their files), in less than a minute
	$(PYTEST) --quick -m "not slow and not exhaustive and not torch"

test: $(VENV)/.installed  ## what every change must pass
	$(PYTEST) -m "not slow and not exhaustive"

# timm and torchvision without what they ask for; tests/timm_models.py says why they are not in the environment.
build/timm: | $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt --target $@ timm torchvision

# Packages whose optimizers are compared on the page of benchmarks.
build/optimizers: | $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt --target $@ torchao pytorch_optimizer

# What a training step is compared with on that page: its plans, without what its recipes need.
build/automodel: | $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt --target $@ nemo_automodel

test-all: $(VENV)/.installed build/timm  ## the slow rest: real processes, whole matrices
	$(PYTEST) -m "slow and not exhaustive" $(DRAWN)

$(VENV)/.docs: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	@touch $@

docs: $(VENV)/.docs  ## the site, in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "open build/site/index.html"

demo: $(VENV)/.installed  ## validate, refuse, prove and train, on this machine
	@$(BIN)/python -m demo

bench: $(VENV)/.installed build/timm build/optimizers build/automodel  ## the figures of docs/benchmarks*.md, on an idle machine; most of an hour
	$(BIN)/python -m benchmarks

release: $(VENV)/.installed  ## both distributions, built, installed into new environments and tried there; VERSION=0.2.0 writes the version first
	TORCH_CPU_INDEX=$(TORCH_CPU_INDEX) $(BIN)/python tools/release.py --out $(or $(DIST),dist) $(if $(VERSION),--version $(VERSION))

gpu: $(VENV)/.installed  ## what eight minutes of a CUDA device can tell (MINUTES, RESULTS: a folder that has none yet)
	$(BIN)/python -m tests.gpu --minutes $(or $(MINUTES),8) --out $(or $(RESULTS),build/gpu)

# Two releases: of what we build on, or torch and transformers in an environment of their own.
judge: $(VENV)/.installed  ## WHAT=drift OLD=a.whl NEW=b.whl: what changed of what concerns us; WHAT=versions PAIR=TORCH/TRANSFORMERS: whether it works; WHAT=exports: plans in others' own code
	$(BIN)/python -m tests.$(WHAT) $(or $(PAIR),$(if $(OLD),$(OLD) $(NEW) --validate)) $(DRAWN)

judges: soundness adversaries mutants zoo variants exhaustive ep pp steps two-writers faults  ## all that follow; a day, so rather with SHARE

soundness: $(VENV)/.installed  ## every edit of every plan, judged by validate and by the numeric proof; hours
	$(BIN)/python -m tests.soundness --tp 2 4 $(if $(DRAWN),--sample 14 $(DRAWN),--table reports/soundness.md)
	$(BIN)/python -m tests.soundness --tp 2 4 $(if $(DRAWN),--sample 14 $(DRAWN),--table reports/soundness-experts.md) $(foreach m,mixtral gpt_oss deepseek_v3 qwen2_moe qwen3_moe,$(m)=$(m):ep)

adversaries: $(VENV)/.installed  ## models that try to get a wrong plan past validate, judged in real processes; half an hour
	$(BIN)/python -m tests.adversaries $(DRAWN)
	$(BIN)/python -m tests.adversaries.random_modules --examples 200 $(DRAWN)
	$(BIN)/python -m tests.adversaries.generated --count 150 $(or $(DRAWN),--seed $(SEED))

mutants: $(VENV)/.installed  ## changes of the run-time, made by rule: validate refuses a plan that uses the line; ten minutes
	$(BIN)/python -m tests.mutants $(or $(DRAWN),--seed $(SEED))

zoo: $(VENV)/.installed  ## the built-in plan of every model type, proven; hours; goes on where it was stopped
	@wrong=0; run() { echo "$$*"; $(BIN)/python -m "$$@" $(DRAWN) || wrong=1; }; \
	run tests.zoo --table reports/model-types.md; \
	run tests.zoo.image_text --table reports/image-text-types.md; \
	run tests.zoo.other_types --table reports/other-types.md; \
	run tests.zoo --checkpoints --table reports/model-types.md; \
	run tests.zoo --experts --table reports/model-types.md; \
	run tests.zoo --pipelines --table reports/model-types.md; \
	run tests.zoo --context --table reports/model-types.md; \
	run tests.zoo --init --table reports/model-types.md; \
	run tests.zoo.expert_types --table reports/expert-types.md; \
	run tests.zoo.diffusion --table reports/diffusion-types.md; \
	exit $$wrong

variants: $(VENV)/.installed  ## `auto` with published checkpoints and each switch of each model type, and with drawn configurations; two hours
	$(BIN)/python -m tests.variants $(DRAWN)
	$(BIN)/python -m tests.variants.drawn --count 200 $(or $(DRAWN),--seed $(SEED))

exhaustive: $(VENV)/.installed build/timm  ## what test-all has a sample of
	$(PYTEST) -m exhaustive $(DRAWN)
	$(PYTEST) --hypothesis-profile default $(shell grep -l "^from hypothesis" tests/test_*.py)

ep: $(VENV)/.installed  ## expert parallelism: every plan that distributes experts, and on real processes
	$(PYTEST) -m "slow or exhaustive" $(DRAWN) $(wildcard tests/test_*expert*.py)

pp: $(VENV)/.installed  ## pipeline parallelism: every schedule, mesh and family, on real processes
	$(PYTEST) -m "slow or exhaustive" $(DRAWN) $(wildcard tests/test_processes_pipeline*.py)

steps: $(VENV)/.installed  ## training steps, wrong ones and right ones: what `verify --step` names
	$(PYTEST) -m "slow or exhaustive" $(DRAWN) tests/test_processes_steps.py

two-writers: $(VENV)/.installed  ## two jobs that save one folder, 1,000 times, stopped, continued and killed at drawn places
	$(BIN)/python -m tests.two_writers --rounds 1000 $(or $(DRAWN),--seed $(SEED))

faults: $(VENV)/.installed  ## jobs whose ranks are killed and stopped, disks that are full, files that are damaged: all ranks end with a line, and what follows is bit-equal
	$(BIN)/python -m tests.faults $(or $(DRAWN),--seed $(SEED))
