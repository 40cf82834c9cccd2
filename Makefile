# Everything runs in a virtual environment made from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where the CPU build of torch is, for a pip whose own sources do not have it.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup
# Processes that tests start compile nothing again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs first-run browser gates quick test test-all exhaustive ep pp soundness adversaries zoo variants drawn bench bench-gpu gpu generated clean

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a minute or two)"
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) || $(INSTALL) --extra-index-url $(TORCH_CPU_INDEX)
	@touch $@

demo: $(VENV)/.installed  ## validate, refuse, prove and train, on this machine
	@$(BIN)/python -m demo

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

test-all: $(VENV)/.installed build/timm  ## the slow rest: real processes, whole matrices
	$(PYTEST) -m "slow and not exhaustive"

exhaustive: $(VENV)/.installed build/timm  ## what test-all has a sample of
	$(PYTEST) -m exhaustive

ep: $(VENV)/.installed  ## expert parallelism: every plan that distributes experts, and on real processes
	$(PYTEST) -m "slow or exhaustive" $(wildcard tests/test_*expert*.py)

pp: $(VENV)/.installed  ## pipeline parallelism: every schedule, mesh and family, on real processes
	$(PYTEST) -m "slow or exhaustive" $(wildcard tests/test_processes_pipeline*.py)

soundness: $(VENV)/.installed  ## every edit of every plan, judged by validate and by the numeric proof; hours
	$(BIN)/python -m tests.soundness --tp 2 4 --table docs/soundness.md
	$(BIN)/python -m tests.soundness --tp 2 4 --table docs/soundness-experts.md $(foreach m,mixtral gpt_oss deepseek_v3 qwen2_moe qwen3_moe,$(m)=$(m):ep)

adversaries: $(VENV)/.installed  ## models that try to get a wrong plan past validate, judged in real processes; half an hour
	$(BIN)/python -m tests.adversaries
	$(BIN)/python -m tests.adversaries.random_modules --examples 200

zoo: $(VENV)/.installed  ## the built-in plan of every model type, proven; most of an hour
	$(BIN)/python -m tests.zoo --table docs/model-types.md
	$(BIN)/python -m tests.zoo.image_text --table docs/image-text-types.md
	$(BIN)/python -m tests.zoo.other_types --table docs/other-types.md
	$(BIN)/python -m tests.zoo --checkpoints --table docs/model-types.md
	$(BIN)/python -m tests.zoo --experts --table docs/model-types.md
	$(BIN)/python -m tests.zoo.expert_types --table docs/expert-types.md
	$(BIN)/python -m tests.zoo.diffusion --table docs/diffusion-types.md

variants: $(VENV)/.installed  ## `auto` with published checkpoints and with each switch of each model type; two hours
	$(BIN)/python -m tests.variants

drawn: $(VENV)/.installed  ## configurations drawn by SEED, which nobody chose, judged with other weights and inputs than the proof's; ten minutes
	$(BIN)/python -m tests.variants.drawn --seed $(SEED) --count $(or $(COUNT),200) --tp $(or $(TP),2)

bench: $(VENV)/.installed  ## the figures of docs/benchmarks.md, on an idle machine; most of an hour
	$(BIN)/python -m benchmarks

bench-gpu: $(VENV)/.installed  ## those that need a CUDA device
	$(BIN)/python -m benchmarks gpu

gpu: $(VENV)/.installed  ## what eight minutes of a CUDA device can tell (MINUTES, RESULTS: a folder that has none yet)
	$(BIN)/python -m tests.gpu --minutes $(or $(MINUTES),8) --out $(or $(RESULTS),build/gpu)

# For a machine with torch and transformers, Python 3.12 and no package index: what shardplan needs besides.
build/wheels: constraints.txt | $(VENV)/.installed
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --only-binary :all: --python-version 3.12 \
		--platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --constraint constraints.txt -d $@ pydantic

$(VENV)/.docs: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	@touch $@

docs: $(VENV)/.docs  ## the site, in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "open build/site/index.html"

first-run: $(VENV)/.installed  ## README's and the quickstart's commands in a fresh environment, with how long it takes
	$(BIN)/python -m pytest -s -m exhaustive tests/test_first_run.py

browser: docs  ## the site and the report in a headless Chromium (Debian: chromium, chromium-driver); pictures in build/pictures
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[browser]"
	$(BIN)/python -m pytest -m exhaustive tests/browser

generated: $(VENV)/.installed  ## schemas, generated docs, and the expected texts of cases and docs
	$(BIN)/python tools/generate.py
	$(BIN)/python tools/style_table.py
	$(BIN)/python tests/update_cases.py
	$(BIN)/python tests/doc_blocks.py

clean:
	rm -rf $(VENV) build dist .pytest_cache
