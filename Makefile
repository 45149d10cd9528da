# Every target first brings .venv up to date; nothing is installed outside the checkout.

PYTHON ?= python3
RANKS  ?= 2
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp

.PHONY: setup train test test-gpu lint bench docs clean
.DEFAULT_GOAL := help

help:
	@echo "make train   train a small GPT, cut into actors on $(RANKS) MPI ranks (RANKS=n for another number)"
	@echo "make test    run all tests"
	@echo "make lint    ruff and mypy --strict"
	@echo "make bench   the benchmarks that need no GPU"
	@echo "make docs    build the documentation into site/"
	@echo "make setup   only create or update $(VENV)"

setup: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "cg needs Python 3.11 to 3.13; '$(PYTHON)' is $$($(PYTHON) --version). Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    echo "Installing python3-venv, which Debian ships apart from python3." && \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv && \
	    rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); } || \
	  { echo "Could not create $(VENV). On Debian: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[mpich,examples,test,lint,docs]' -c constraints.txt
	@mkdir -p .dev && ln -sfn .. .dev/cg
	@touch $@

train: setup
	$(BIN)/python -m cg.launch -n $(RANKS) examples/train_gpt.py $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

test-gpu: setup
	$(BIN)/python -m pytest -m gpu $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.dev $(BIN)/mypy -p cg.ir -p cg.tracer -p cg.passes -p cg.backends -p cg.launch

bench: setup
	$(BIN)/python benchmarks/run.py $(ARGS)

docs: setup
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) .dev build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
