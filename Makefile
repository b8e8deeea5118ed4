.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# the first interpreter that starts and is new enough
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

WORKERS ?= 2
# each worker is a process of its own: more threads would only fight over the cores; what is compiled
# once is read by all of them, and by the interpreters that tests start
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# of those that attnspec can compile
SPEC ?= examples/sparse_strided.attn
EMITTED := $(notdir $(SPEC:.attn=_attn.py))

.PHONY: help setup demo test quick lint types format slow wheel soak replay reference docs bench clean

help:
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# the pinned tools and this package, in .venv
setup: $(INSTALLED)

# torch comes first and by its exact version, so that no later resolution can replace the build
# that pip is configured to take
$(INSTALLED): pyproject.toml constraints-dev.txt
	@test -n "$(PYTHON)" || { echo "needed: Python 3.11 or newer" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -e ".[dev]"
	touch $@

demo: $(INSTALLED)  ## compile an example, look at it, verify the emitted module and run it
	$(BIN)/attnspec compile $(SPEC)
	$(BIN)/attnspec check $(SPEC)
	$(BIN)/attnspec show $(SPEC) $$($(BIN)/python -m attnspec.examples.demo $(SPEC))
	$(BIN)/python -m attnspec.examples.demo $(SPEC) $(EMITTED)
	@echo "next: change a copy of $(SPEC), then '$(BIN)/attnspec check' and '$(BIN)/attnspec compile' it;"
	@echo "docs/index.md has the first steps"

# types are checked by one process, from nothing for a minute: beside the tests, so that no core waits
test: lint  ## lint, types, tests and the examples in the documentation
	@$(MAKE) --no-print-directory -j2 types tests-alone

.PHONY: tests-alone
tests-alone: $(INSTALLED)
	$(PYTEST)

BASE ?= HEAD

quick: lint types  ## lint, types and the tests of the rooms that changed since BASE=HEAD
	@chosen="$$($(BIN)/python tests/quick.py $(BASE))" || exit; \
	if test -n "$$chosen"; then $(PYTEST) $$chosen; else echo "nothing has changed"; fi

# rules, layout and floors
lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(BIN)/lint-imports

types: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)  ## rewrite the sources in the agreed layout
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

slow: $(INSTALLED)  ## the tests that take more than a few seconds each
	$(PYTEST) -m slow

TORCHES ?=

wheel: $(INSTALLED)  ## the tests of the public interface against the wheel; TORCHES="2.9.0 newest"
	$(BIN)/python tests/from_wheel.py $(TORCHES) -- -n $(WORKERS) --dist loadgroup

MINUTES ?= 10
SEED ?= 0
soak: $(INSTALLED)  ## random specs against a meaning of their own, for MINUTES=10 from SEED=0
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m soak \
		--minutes $(MINUTES) --seed $(SEED) --processes $(WORKERS)

REPLAY ?=

replay: $(INSTALLED)  ## what BASE=commit and this tree say and compute of the same specs (minutes)
	$(BIN)/python tests/replay.py --base $(BASE) $(REPLAY)

reference: $(INSTALLED)  ## write what is generated: parser tables, tables and transcripts of pages, colours for editors
	$(BIN)/python -m attnspec.grammar.tables
	$(BIN)/python docs/reference_tables.py grammar/README.md
	$(BIN)/python docs/textmate.py editors/vscode/syntaxes/attn.tmLanguage.json
	$(BIN)/python -m pytest -q tests/graphs/test_arguments.py --update-golden
	$(BIN)/python tests/transcripts.py README.md docs/*.md
	$(BIN)/python -m attnspec.examples.picture examples/zoo.svg
	$(BIN)/python -W ignore tests/model_families.py attnspec/integrations/README.md
	$(BIN)/python -W ignore tests/transforms.py attnspec/runtime/README.md
	$(BIN)/python -W ignore tests/model_settings.py docs/verify.md

docs: $(INSTALLED)  ## build the guide in site/, links checked; site/index.html needs no network
	$(BIN)/mkdocs build --quiet --strict
	@echo "wrote site/index.html; its search needs a server: $(BIN)/mkdocs serve"

bench: $(INSTALLED)  ## time everything, draw the tables and plots (half an hour)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.readme_tables

clean:  ## remove everything that the targets above made
	rm -rf $(VENV) .versions build dist site *.egg-info .mutants .mypy_cache .pytest_cache .ruff_cache .hypothesis *_attn.py
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
