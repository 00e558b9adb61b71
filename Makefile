# Every target sets up its own environment on first use.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-torch check docs bench frontier multilevel families generated generated-tests long-tests killed gpu-check drop-in zoo transformer clean

demo: $(READY)  ## a model inside a hard limit that stops plain PyTorch, then ResNet-50 and GPT-2 in half of their activation memory; about two minutes
	$(BIN)/memfit demo --force

test: $(READY)  ## the fast tests
	$(BIN)/python -m pytest -m "not slow and not long" -n 2 --dist loadfile

long-tests: $(READY)  ## files of fast tests that take long as a whole, beside the fast tests
	$(BIN)/python -m pytest tests -m "long and not slow" -n 2 --dist loadfile

OTHER = .venv-torch-$(VERSION)

test-torch:  ## the fast tests on another version of torch, in an environment of its own: make test-torch VERSION=2.15.0
	@test -n "$(VERSION)" || { echo "which one? make test-torch VERSION=2.15.0"; exit 1; }
	$(PYTHON) -m venv $(OTHER)
	sed -e '/^torch==/d' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt torch==$(VERSION) \
	  highspy jinja2 platformdirs psutil rich safetensors typer accelerate lightning matplotlib peft pillow torchao transformers \
	  mkdocs mkdocs-material "mkdocstrings[python]" hypothesis mypy pytest pytest-xdist pyyaml ruff types-psutil
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt --no-deps timm torchvision --editable .  # they ask for one torch
	$(OTHER)/bin/python -m pytest -m "not slow" -n 2 --dist loadfile

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

N ?= 1000

generated-tests: $(READY)  ## 200 random models, always the same ones; the fast tests have 60 others
	$(BIN)/python -m pytest tests/generated -m slow -n 2

generated: $(READY)  ## random models and loops, plain and fitted: make generated N=10000; goes on where it stood
	cd tests && ../$(BIN)/python -W ignore -m generated $(N)

K ?= 200

killed: $(READY)  ## processes killed while they fit, plan, save and compile, and what the next runs make of it: make killed K=200; goes on where it stood
	cd tests && ../$(BIN)/python -W ignore -m killed $(K)

gpu-check: $(READY)  ## estimates, plans, offloading and equality on this machine's GPU; ten minutes, one JSON file to send back
	$(BIN)/python -W ignore -m benchmarks.gpu_check

drop-in: $(READY)  ## the table of usage patterns, docs/drop-in.md, from what the patterns of the tests state
	cd tests && ../$(BIN)/python -m patterns

zoo: $(READY)  ## the plans of the zoo that are missing; goes on where it stood, needs an idle machine
	$(BIN)/memfit zoo build src/memfit/zoo/plans

transformer: $(READY)  ## a language model with checkpointing by hand and planned: the whole table
	$(BIN)/python examples/transformer_ptb.py --full

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[models,families,transformers,lightning,accelerate,low-bit,plots,docs,dev]"
	touch $(READY)

clean:
	rm -rf .venv .venv-torch-*
