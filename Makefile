# make demo    the whole main job on a tiny model: convert, build, generate, compare with transformers
# make test    every test
# make lint    ruff and mypy
# Each sets up what it needs in .venv, once. PYTHON picks the interpreter, PIP_ARGS goes to pip (e.g. an index with
# CPU builds of torch).

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)

.PHONY: demo test lint format wheel clean

demo: $(VENV)/demo.stamp
	$(BIN)/trtllm-replayssm demo

# One thread a process: the models are tiny, and two processes share the work.
test: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/lint.stamp build/tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/tree $(BIN)/mypy -p trtllm_replayssm -p benchmarks

format: $(VENV)/lint.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/demo.stamp
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info $(VENV)

$(VENV)/python.stamp:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Python 3.11 to 3.13 is needed for the pinned versions: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# demo < test < lint: each adds packages to the one environment.
$(VENV)/demo.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	@echo "installing trtllm-replayssm into $(VENV), with the versions it was tested with"
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp tests/tensorrt/oldest.txt tests/remote_code.txt
	$(PIP) --editable '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade \
		--target $(VENV)/tensorrt-10.14 --requirement tests/tensorrt/oldest.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade \
		--target $(VENV)/remote-code --requirement tests/remote_code.txt
	touch $@

$(VENV)/lint.stamp: $(VENV)/test.stamp
	$(PIP) ruff mypy
	touch $@

# mypy knows no package-dir mapping, so it is shown the tree as it is installed.
.PHONY: build/tree
build/tree:
	rm -rf $@
	mkdir -p $@/trtllm_replayssm
	ln -s $(CURDIR)/trtllm_replayssm/* $(CURDIR)/plugins $(CURDIR)/builders $@/trtllm_replayssm/
	ln -s $(CURDIR)/benchmarks $@/
