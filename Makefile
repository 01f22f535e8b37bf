# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install demo test pages test-launchers chaos fuzz lint types check format bench profiles models clean

help: ## Say what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

install: $(INSTALLED) ## Make .venv and install the three programs into it

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev,digits,plots,tensorboard]'
	touch $@

demo: $(INSTALLED) ## Profile, plan and train a small network on real data with four worker processes
	PATH="$(CURDIR)/$(BIN):$$PATH" examples/demo.sh

test: $(INSTALLED) ## Run the tests
	$(BIN)/python -m pytest

pages: $(INSTALLED) ## Run the commands of README.md and docs, each page's in a folder of its own
	timeout 600 $(BIN)/python -m pytest -m pages tests/test_pages_run.py

test-launchers: $(INSTALLED) ## Run the tests under real launchers: Slurm, Open MPI, torchrun; as root it installs them
	tests/install-packages.sh munge slurmctld slurmd slurm-client openmpi-bin iproute2
	$(BIN)/python -c 'import kubernetes_validate, yaml' 2> /dev/null || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[clusters]'
	timeout 600 $(BIN)/python -m pytest -m launchers

chaos: $(INSTALLED) ## Kill workers at 50 random moments of one run; up to 15 minutes (KILLS=50 SEED=0)
	timeout 900 $(BIN)/python -m pytest -m slow -s tests/test_restarts.py

fuzz: $(INSTALLED) ## Feed hostile input to all readers; up to 15 minutes (COUNT=400000 SEED=0)
	timeout 900 $(BIN)/python -m pytest -m slow -s -o faulthandler_timeout=0 tests/test_fuzz.py

lint: $(INSTALLED) ## Look for mistakes and style, change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) ## Check the types, change nothing
	$(BIN)/mypy

check: lint types test ## All of lint, types and test; changes nothing

format: $(INSTALLED) ## Format the code; changes files
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED) ## Measure speed, as ratios within one run; some seven minutes on two idle cores
	$(BIN)/python benchmarks/bench.py --pairs 2
	$(BIN)/python benchmarks/peers.py --quick

profiles: $(INSTALLED) ## Estimate the profiles below profiles/ and make the plans below plans/ again
	$(BIN)/python profiles/regenerate.py

models: $(INSTALLED) ## Try torchvision's models that are not on record, for pd-profile --list-models
	$(BIN)/python benchmarks/try_models.py

clean: ## Remove what the other targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
