# make demo-vit: a 2 x 2 grid of small vision transformers on scikit-learn's digits, analysed
# make demo: install, train the embedded suite, walk it, write results/nano/report.html
# make test: install, run every test          make lint: ruff, pyright, import-linter
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo demo-vit test lint .venv

# The stamp is written last: an interrupted install is not taken for a finished one.
.venv: .venv/installed
# uv takes a quarter of pip's time; pip, where only pip has been told of a mirror. Compiled now, once: where Python may not
# write bytecode, every process would compile torch and transformers anew, for a quarter of a minute.
.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "setting up .venv (torch and its CUDA libraries take about 6 GB) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv && $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --editable '.[dev]' || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: .venv/installed
	$(BIN)/python -m tracker.pythia --model nano --measures all --out results/nano --wandb offline

demo-vit: .venv/installed
	$(BIN)/python -m vit.grid --config digits --weight_decays 0.01,0.1 --drop_paths 0,0.1 --engine processes --jobs 2 --threads 1 --wandb offline --out results/vit/demo
	$(BIN)/python -m vit.analysis results/vit/demo

# Each process has a core: threads of many would be in each other's way. Tests of a file share what they build.
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
