# Every target sets up its own environment on first use.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check docs bench frontier multilevel families clean

demo: $(READY)  ## ResNet-50 in half of its activation memory: planned, proven, measured, trained
	$(BIN)/python examples/fit.py

test: $(READY)  ## the fast tests
	$(BIN)/python -m pytest -m "not slow"

check: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)  ## the pages of docs/ as a site in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet  # without the theme's word about its successor

bench: $(READY)  ## the standard cases: estimated against measured, captured against eager
	$(BIN)/python -m benchmarks.accuracy

frontier: $(READY)  ## memory against time under byte budgets, beside the peers; hours, goes on where it stood
	$(BIN)/python -m benchmarks.frontier

multilevel: $(READY)  ## hypergradients beside Betty (if it is installed), and the ablation on reweighting ResNet-50
	$(BIN)/python -W ignore -m benchmarks.multilevel

families: $(READY)  ## a matrix of real architectures: captured, equal to eager, fitted; goes on where it stood
	$(BIN)/python -W ignore -m benchmarks.families

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[models,families,transformers,lightning,accelerate,low-bit,plots,docs,dev]"
	touch $(READY)

clean:
	rm -rf .venv
