# Every target sets up what it needs; running one twice does the work once.
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# The default interpreter gets .venv; another one asked for by PYTHON=... gets a folder of its own.
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(VERSION))
BIN := $(VENV)/bin
TESTS ?= tests

.PHONY: quickstart test scale slurm chaos parity pods lint setup clean

quickstart: $(VENV)/ready
	$(BIN)/python -m experiments.reproduce quickstart

# All of it on the default interpreter; on another one a quick slice, which is where versions differ.
test: $(VENV)/ready-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/parity \
	  -m $(if $(filter python3,$(PYTHON)),"not scale",quick) $(TESTS)

# What takes many processes, devices that are not here, or hundreds of tries: hosts, meshes, kills, damaged files, wrong
# commands, training that covers the zoo, and the variants of a test beyond the first few.
scale: $(VENV)/ready-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/parity -m scale $(TESTS)

# What pods, disks and people do to runs, hundreds of times, and a table of what was survived. QUICK=1: a tenth of it.
chaos: $(VENV)/ready-dev
	$(BIN)/python -m tests.chaos $(if $(QUICK),--quick,--out=experiments/results/chaos)

# The same weights in torch and transformers give the same outputs and gradients.
parity: $(VENV)/ready-parity
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/parity

# Every pod config compiled for its machine, by whichever compiler this one has; takes up where it stopped.
pods: $(VENV)/ready
	$(BIN)/python -m experiments.bench pods --out=runs/bench_pods.jsonl

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Sweeps on a Slurm cluster of this machine alone; `make scale` has it too where there is Slurm. Debian's is installed
# where there is none, which takes root.
slurm: $(VENV)/ready-dev /usr/sbin/slurmctld
	$(BIN)/python -m pytest tests/test_slurm.py

/usr/sbin/slurmctld:
	apt-get update -qq
	apt-get install -qq -y --no-install-recommends slurm-wlm munge

setup: $(VENV)/ready

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Longview needs Python 3.11 or newer; $(PYTHON) is $(VERSION). Try: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/ready: requirements.txt $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/ready-dev: requirements-dev.txt $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

$(VENV)/ready-parity: requirements-parity.txt $(VENV)/ready-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-parity.txt
	@touch $@

clean:
	rm -rf .venv .venv-* runs
