# make demo: install, train the small model `nano`, measure its checkpoints, write results/nano/report.html
# make demo-vit: train and analyse a 2 x 2 grid of small vision transformers on scikit-learn's digits
# make test: install, run the tests that take less than 1.5 s each, of those with parameters the first case
# make test-all: install, run every test
# make test-shapes: run the tests of the measures with the shapes of all tensors checked at every call
# make test-kernels: run the tests that take less than 1.5 s with the kernels of other processors: all COMBINATIONS, or KERNELS=avx2;
#     KERNELS=day takes another one each day
# make test-oldest: run every test with the oldest versions that pyproject.toml promises, in build/oldest
# make sweep-tenth: sweep a tenth of the classes of transformers and timm (docs/sweep.md), another one each day
# make mutants: plant small faults in one file, FILE=tracker/linalg/svd.py or another each day, and run the fast tests that reach their
#     lines; ARGS="--count 10"
# make reached: run the tests of `make test` once more, one after another, and write pages that list beside each line of the product
#     the tests that reach it, build/reached/index.html; TESTS=tests/linalg
# make golden: compare what a dozen small cases give with what they gave at the commit that tests/golden/reference.toml names
# make lint: run ruff, pyright and import-linter, and count the Python tokens of product and tests
# make package: build wheel and sdist, install the wheel in a new environment without extras, and use it
# make docs: build the documentation as a site, website/site
# make check: what the CI runs (.ci/run, which installs Chromium, without which tests of pages are skipped); all but test-oldest
# make gpu: measure on a GPU, with the Python packages that are there (docs/gpu.md); WHEELS=directory of missing packages
help:
	@sed -n '/^help:/q; s/^# //p' Makefile

PYTHON ?= python3
BIN := .venv/bin

# Where bytecode is not written, every test process compiles the tests again: 12 s.
export PYTHONDONTWRITEBYTECODE =

# One thread per process, so that processes do not compete for cores. Tests of one file share fixtures, so one process runs them.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# What test-kernels sets: the newest instructions that PyTorch's own kernels, oneDNN's and MKL's may use, or the threads.
COMBINATIONS := aten onednn mkl avx2 threads
aten := ATEN_CPU_CAPABILITY=default
onednn := ONEDNN_MAX_CPU_ISA=SSE41
mkl := MKL_ENABLE_INSTRUCTIONS=SSE4_2
avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
threads := OMP_NUM_THREADS=2
KERNELS ?= $(COMBINATIONS)
OF_TODAY = $(word $(shell expr `date +%j` % $(words $(COMBINATIONS)) + 1),$(COMBINATIONS))

.PHONY: help check demo demo-vit test test-all test-shapes test-kernels $(COMBINATIONS:%=kernels-%) test-oldest sweep-tenth mutants reached golden lint docs package gpu .venv

# The stamp is written last, so that an interrupted installation is repeated.
.venv: .venv/installed
# uv takes a quarter of the time of pip, which is the fallback where only pip knows the package mirror. Bytecode is compiled
# once, here: where Python cannot write it, every process would spend 15 s compiling torch and transformers.
.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "setting up .venv (torch and its CUDA libraries take about 6 GB) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv && $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --editable '.[dev]' || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# The quick ones first
CHECKS := lint docs package golden test-shapes sweep-tenth test-all test-kernels

check:
	@for step in $(CHECKS); do $(MAKE) --no-print-directory KERNELS=day $$step || exit 1; done

demo: .venv/installed
	$(BIN)/python -m tracker.pythia --model nano --measures all --out results/nano --wandb offline

demo-vit: .venv/installed
	$(BIN)/python -m vit.grid --config digits --weight_decays 0.01,0.1 --drop_paths 0,0.1 --threads 1 --wandb offline --out results/vit/demo
	$(BIN)/python -m vit.analysis results/vit/demo

# Tests that measure time run afterwards, one after another: processes beside them would take some of it.
test: .venv/installed
	FIRST_CASES=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not alone" $(PARALLEL)
	FIRST_CASES=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and alone"

test-all: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not alone" $(PARALLEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m alone

test-shapes: .venv/installed
	CHECK_SHAPES=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not alone" $(PARALLEL) tests/linalg tests/jacobians tests/measures tests/zoo tests/test_measure.py

test-kernels: $(patsubst %,kernels-%,$(KERNELS:day=$(OF_TODAY)))

$(COMBINATIONS:%=kernels-%): kernels-%: .venv/installed
	OMP_NUM_THREADS=1 $($*) $(BIN)/python -m pytest -m "not slow and not alone" $(PARALLEL)

test-oldest: .venv/installed
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) build/oldest
	$(BIN)/uv pip install --quiet --compile-bytecode --python build/oldest/bin/python --resolution lowest-direct --editable '.[dev]'
	OMP_NUM_THREADS=1 build/oldest/bin/python -m pytest -m "not alone" $(PARALLEL)
	OMP_NUM_THREADS=1 build/oldest/bin/python -m pytest -m alone

sweep-tenth: .venv/installed
	$(BIN)/python -m tests.sweep --share day/10

mutants: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(or $(FILE),day) --jobs $(or $(JOBS),2) $(ARGS)

reached: .venv/installed
	FIRST_CASES=1 OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -m "not slow and not alone" $(TESTS)
	$(BIN)/coverage html

golden: .venv/installed
	$(BIN)/python -m tests.golden check

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m tests.size

package: .venv/installed
	rm -rf dist build/clean
	$(BIN)/uv build --quiet --out-dir dist
	$(BIN)/uv venv --quiet --python $(PYTHON) build/clean
	$(BIN)/uv pip install --quiet --python build/clean/bin/python dist/*.whl
	cd build && clean/bin/python ../tests/clean_environment.py

# mkdocs has an environment of its own, of 300 MB; it reads the code without importing it.
docs: website/.venv/installed
	cd website && NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

website/.venv/installed: website/requirements.txt
	$(PYTHON) -m venv website/.venv
	website/.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement website/requirements.txt
	@touch $@

# Nothing is installed: a machine with a GPU may have no network.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)
