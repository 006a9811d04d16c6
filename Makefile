# `make demo` and `make test` need Python 3.11 or later and nothing else: each makes .venv by itself
# and uses it again until pyproject.toml changes.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: demo test lint catalogue clean nightly suites coverage mutation audit test-oldest lock

demo: $(VENV)/with-rtx
	@mkdir -p demo
	$(BIN)/rewriter fix models/nafnet.onnx -o demo/nafnet.fixed.onnx --inputs models/nafnet.npz --report demo/nafnet.html --deploy python
	@echo "The photograph before and after: open demo/nafnet.html in a browser"
	@echo "The commands above run after: . $(BIN)/activate"

# one process for each core, and each file in one of them, which computes what its tests share once
PYTEST ?= -n auto --dist loadfile

test: lint
	$(BIN)/python -m pytest -q $(PYTEST)

lint: $(VENV)/with-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m docs.catalogue --check

catalogue: $(VENV)/with-dev
	$(BIN)/python -m docs.catalogue

# -- what takes hours; tests/suites/README.md says what each of them does --------------------------

MUTANTS ?= 400
SEED ?= $(shell date +%Y%m%d)

nightly: suites coverage mutation audit

suites: $(VENV)/with-nightly
	REWRITER_NIGHTLY=1 $(BIN)/python -m pytest -q tests/suites

# all the rest, in full; fails below 95 % of lines or 90 % of branches, too
coverage: $(VENV)/with-nightly
	REWRITER_NIGHTLY=1 $(BIN)/python -m pytest -q $(PYTEST) --ignore=tests/suites --cov --cov-report=json:build/coverage.json
	$(BIN)/python tests/coverage_floor.py build/coverage.json

mutation: $(VENV)/with-nightly
	$(BIN)/python tests/suites/mutation.py --mutants $(MUTANTS) --seed $(SEED)

audit: $(VENV)/with-nightly
	$(BIN)/pip-audit -r requirements-dev.lock --disable-pip --require-hashes --strict --progress-spinner off

# the lowest versions that pyproject.toml allows, in an environment of their own
test-oldest:
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install -qq --disable-pip-version-check "uv>=0.7"
	$(VENV)-oldest/bin/uv pip install -q --python $(VENV)-oldest/bin/python --resolution lowest-direct --editable ".[dev]"
	$(VENV)-oldest/bin/python -m pytest -q

lock: $(VENV)/with-nightly
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra rtx --extra nightly --universal \
		--python-version 3.11 --generate-hashes --no-emit-index-url --no-header -q -o requirements-dev.lock

clean:
	rm -rf $(VENV) $(VENV)-oldest build dist demo *.egg-info

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or later found; name one: make PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/with-rtx: pyproject.toml | $(BIN)/python
	@echo "pip installs ONNX Runtime and TensorRT-RTX into $(VENV), 0.8 GB: half a minute on a fast line"
	$(PIP) --editable ".[rtx]"
	@touch $@

# PyTorch's CPU build: 190 MB instead of 3 GB. Where pip is not told of one, PyTorch's own index has it.
# Ultralytics comes without its dependencies: torchvision on PyPI loads with the CUDA build alone, and
# breaks Lightning beside another one.
TORCH := torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

$(VENV)/with-nightly: $(VENV)/with-dev
	$(PIP) --editable ".[nightly]"
	@touch $@

$(VENV)/with-dev: pyproject.toml | $(BIN)/python
	$(PIP) "$(TORCH)+cpu" 2>/dev/null || $(PIP) --index-url $(TORCH_INDEX) "$(TORCH)" || true
	$(PIP) --editable ".[rtx,dev,hooks,hooks-test]"
	$(PIP) --no-deps "ultralytics>=8.4,<9" "ultralytics-thop>=2"
	@touch $(VENV)/with-rtx $@
