# Everything a contributor does. Each target is idempotent and sets up what it needs in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BROWSER_STAMP := $(VENV)/.installed-browser
DOCS_STAMP := $(VENV)/.installed-docs
export OMP_NUM_THREADS ?= 1
# Byte code is kept even where the environment says otherwise: the tests start hundreds of processes, and each would
# compile our sources anew, a second of processor time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test test-all test-newest browser browser-setup lint verify-all odd-models architectures fuzz golden guards house faults bounds bench predict gpu published parallel accuracy formats intervals checkpoint generated docs test-docs wheel clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(STAMP)  ## create .venv and install everything

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $(DOCS_STAMP)

demo: setup  ## plan GPT-2 on two local workers, verify it, train it
	$(BIN)/python -m examples.demo

# A worker that dies ends the run: with --dist loadfile pytest-xdist 3.8 starts another and then waits for it for ever.
test: setup  ## all tests, one case per idea, and a smoke subset of the verification matrix
	$(BIN)/python -m pytest -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

test-all: setup  ## all tests with all their cases; before an issue ends
	$(BIN)/python -m pytest -m "" -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

test-newest:  ## the newest release of every dependency in .venv-newest (6 GB): smoke tests and demo; PYTHON=python3.13
	PYTHON=$(PYTHON) bash .ci/newest

browser: $(BROWSER_STAMP)  ## the report page in a real browser; installs Debian's Chromium and Playwright
	$(BIN)/python -m pytest tests/browser

browser-setup: $(BROWSER_STAMP)

# apt-get is run where Chromium is missing, and needs root then; elsewhere install Chromium or Chrome in another way.
$(BROWSER_STAMP): $(STAMP)
	command -v chromium >/dev/null || command -v google-chrome >/dev/null || (timeout 120 apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	touch $(BROWSER_STAMP)

lint: setup  ## ruff, strict mypy, floors, rooms and texts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_rooms.py tests/unit/test_texts.py

verify-all: setup  ## every model x stages x schedule, x mesh x pattern, x groups x pattern, in float64 on real processes
	$(BIN)/python -m benchmarks.verify_matrix
	$(BIN)/python -m benchmarks.verify_matrix --strategy feature
	$(BIN)/python -m benchmarks.verify_matrix --strategy hybrid
	$(BIN)/python -m benchmarks.fuzz --strategies hybrid --models 0:50 --plans 8

odd-models: setup  ## 447 unusual models x 8 ways to plan them, trained beside a plain loop; ODD="--slice 1/8 --ways layer2"
	$(BIN)/python -m tests.odd_models.run $(ODD)

architectures: setup  ## the bundled families and further architectures of transformers: traced, planned, verified
	$(BIN)/python -m benchmarks.architectures

fuzz: setup  ## 10,000 random partitions of random models, verified; FUZZ="--models 0:50 --plans 20"
	$(BIN)/python -m benchmarks.fuzz $(FUZZ)

golden: setup  ## sixty plans of every kind as canonical text, compared with the hashes in benchmarks/
	$(BIN)/python -m benchmarks.golden_plans

guards: setup  ## plans of the searches compared with the numbers in benchmarks/data; GUARDS="--only cell/gpt2/*"
	$(BIN)/python -m benchmarks.guards $(GUARDS)

house: setup  ## files, rooms, layers, circles, homonyms, constants and lines of this checkout; abilities that are gone
	$(BIN)/python -m benchmarks.house
	$(BIN)/python -m benchmarks.abilities

faults: setup  ## planted one-line faults and mutated programs: the checker, verify and tests must find them
	$(BIN)/python -m benchmarks.faults --tests
	$(BIN)/python -m benchmarks.mutants
	$(BIN)/python -m benchmarks.quotient_mutants

bounds: setup  ## 1,000 random instances: no plan simulates below any bound
	$(BIN)/python -m benchmarks.bound_check

bench: setup  ## the executor beside torch.distributed.pipelining, DTensor and DDP; the engine beside the executor
	$(BIN)/python -m benchmarks.executor
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.sharded
	$(BIN)/python -m benchmarks.hybrid_executor

predict: setup  ## predicted beside measured step time and memory
	$(BIN)/python -m benchmarks.prediction
	$(BIN)/python -m benchmarks.prediction --hybrid

gpu: setup  ## all that one GPU can tell, in 8 minutes: tests, calibration, predicted beside measured; no GPU: nothing
	$(BIN)/python -m benchmarks.gpu

RUNS ?= ../shared/data/published/runs.csv
published: setup  ## predicted beside published runs on GPUs; RUNS=runs.csv
	$(BIN)/python -m benchmarks.published --runs $(RUNS)

PARALLEL_RUNS ?= ../shared/data/published/parallel_runs.csv
parallel: setup  ## predicted beside published runs with tensor, pipeline parallelism, ZeRO; PARALLEL_RUNS=parallel_runs.csv; hours
	$(BIN)/python -m benchmarks.parallel_runs --runs $(PARALLEL_RUNS)

accuracy: setup  ## docs/accuracy.md anew, from the predictions that `make parallel` has stored
	$(BIN)/python -m benchmarks.accuracy --runs $(PARALLEL_RUNS)

intervals: setup  ## the intervals of predictions, fitted anew: published runs predicted again, residuals, spreads, docs/10
	$(BIN)/python -m benchmarks.published --runs $(RUNS) --residuals
	$(BIN)/python -m benchmarks.intervals

PACKAGES := .cache/parsers
formats: setup  ## plans written for other tools, read by their own packages and planned again; 50 MB from PyPI
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --upgrade \
	  --target $(PACKAGES) -r tests/parsers/packages.txt
	DS_ACCELERATOR=cpu PYTHONPATH=$(PACKAGES) $(BIN)/python -m pytest tests/parsers

checkpoint: setup  ## seconds and memory of saving and loading 124 M parameters
	$(BIN)/python -m benchmarks.checkpoint

generated: setup  ## rewrite what the docs take from the code: schemas, the map of rooms, command output in docs/09
	$(BIN)/python -m benchmarks.make_docs

docs: $(DOCS_STAMP)  ## build the documentation as a site into site/; broken links fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test-docs: setup  ## run every command and code block of README, tutorial and how-to pages, the slow ones too
	$(BIN)/python -m pytest -m "" tests/distributed/test_pages.py tests/unit/test_docs.py

wheel: setup  ## build the wheel, install it into an empty environment, plan outside the checkout
	PYTHON=$(PYTHON) bash .ci/wheel

clean:
	rm -rf $(VENV) $(VENV)-newest dist build site .pytest_cache .mypy_cache .ruff_cache
