# Targets use the active environment: VIRTUAL_ENV, or CONDA_PREFIX unless that is base.
# Else they make .venv with PYTHON.
PYTHON ?= python3
NPROC ?= $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU' | sed 's/^0$$/2/')
ARGS ?=

ifneq ($(strip $(VIRTUAL_ENV)),)
ENV := $(VIRTUAL_ENV)
else ifneq ($(strip $(CONDA_PREFIX)),)
ENV := $(if $(filter base,$(CONDA_DEFAULT_ENV)),.venv,$(CONDA_PREFIX))
else
ENV := .venv
endif

BIN := $(ENV)/bin
INSTALLED := $(ENV)/.meshwork-installed
# One thread a rank, unless told otherwise: ranks that each take all cores slow each other down.
THREADS := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}

.DEFAULT_GOAL := help
.PHONY: help install train test lint format survey presets bench clean

help:  ## this list
	@grep -E '^[a-z]+:.*  ## ' $(MAKEFILE_LIST) | sed 's/:.*  ## /\t/' | expand -t 10
	@echo 'ARGS="..." adds arguments, NPROC=4 sets the number of processes of train'

install: $(INSTALLED)  ## packages of pyproject.toml, at the versions of constraints.txt

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -e '.[dev,tensorboard]' -c constraints.txt
	touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv

train: $(INSTALLED)  ## train on every GPU, without GPUs in 2 processes
	$(THREADS) $(BIN)/torchrun --standalone --nproc-per-node=$(NPROC) train.py $(ARGS)

test: $(INSTALLED)  ## all tests that need neither network nor GPU
	$(THREADS) $(BIN)/python -m pytest -m 'not slow' $(ARGS)

lint: $(INSTALLED)  ## ruff: style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)  ## ruff: mend style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

survey: $(INSTALLED)  ## every family of timm under every kind of layout
	$(THREADS) $(BIN)/python scripts/survey.py $(ARGS)

presets: $(INSTALLED)  ## train every preset on digits beside one process
	$(THREADS) $(BIN)/python scripts/presets.py $(ARGS)

bench: $(INSTALLED)  ## what the template costs beside a hand-written loop
	$(THREADS) $(BIN)/python scripts/bench.py $(ARGS)

clean:  ## caches and build files; runs and .venv stay
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
