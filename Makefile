# make demo, make test, make test-all, make nightly: each creates the environment that it needs in .venv.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
BIN    := .venv/bin
# A file at a time in each process; what tests have in common is in one file.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder tests

# What is promised to training, whatever the release of torch; pages, benchmarks and docs are not.
CORE   := _torch split ranks checks test_data_parallel.py test_backend.py test_options.py test_config.py \
          test_reducer.py algorithms/test_handle.py system/test_drift.py system/test_training.py
DRIFT  := .venv-$(subst torch==,,$(TORCH))

.PHONY: demo test test-all nightly operators drift gpu lint errors docs clean

demo: .venv/installed
	OMP_NUM_THREADS=1 KINETO_LOG_LEVEL=6 $(BIN)/torchrun --standalone --nproc-per-node 2 \
		examples/train_gpt.py --steps 80 --network 1gbit --overlap build/overlap.html

# The quick set, five minutes on two idle cores. CONTRIBUTING.md says which tests are in it.
test: .venv/installed
	$(PYTEST) -n 2 --set quick

# All tests: the quick set, then the others, which often wait for what they started.
test-all: test
	$(PYTEST) -n 3 --set rest

# What takes long and shows little that the others do not; all operators and modules of torch's own
# database in DDP models, half an hour.
nightly: operators
	$(PYTEST) -n 3 --set nightly

operators: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.system.operators

# The core of the tests on another release: `make drift TORCH=torch==2.11.0`. What PyPI has for
# Linux is the CUDA build, several GB, which runs on CPUs too; so it is no part of CI.
drift: $(DRIFT)/installed
	$(DRIFT)/bin/python -m pytest $(CORE:%=tests/%)
	$(DRIFT)/bin/python -m pytest tests/cli/test_cli.py -k doctor
	$(DRIFT)/bin/ddpopt doctor

# A page of proofs on this machine's GPU, in build/gpu, in nine minutes. Nothing is installed: PYTHON
# is an interpreter that has torch with CUDA, pytest and numpy.
gpu:
	PYTHONPATH=src $(PYTHON) -m tests.gpu --device cuda --output build/gpu

$(DRIFT)/installed: pyproject.toml
	$(PYTHON) -m venv $(DRIFT)
	$(DRIFT)/bin/pip install -q --disable-pip-version-check "$(TORCH)"
	$(DRIFT)/bin/pip install -q --disable-pip-version-check -e ".[cli,test]"
	touch $@

lint: .venv/installed
	$(BIN)/ruff check src tests examples benchmarks docs/tools docs/figures
	$(BIN)/ruff format --check src tests examples benchmarks docs/tools docs/figures
	$(BIN)/mypy

# The tables of docs/errors.md, from the messages in the source; a test compares them.
errors: .venv/installed
	$(BIN)/python docs/tools/error_tables.py

# The site, in build/site; a broken link or an anchor that leads nowhere fails it.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/docs: .venv/installed
	$(BIN)/pip install -q --disable-pip-version-check "$$(echo dist/*.whl)[docs]"
	touch $@

# The wheel is built and installed, so that the tests run what users get. torch comes first, so
# that nothing pulls in another build of it.
.venv/installed: pyproject.toml README.md $(shell find src -name '*.py')
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install -q --disable-pip-version-check build
	rm -rf dist
	$(BIN)/python -m build -q --wheel
	$(BIN)/pip install -q --disable-pip-version-check "$$(echo dist/*.whl)[cli,examples,test,dev]"
	$(BIN)/pip install -q --disable-pip-version-check --force-reinstall --no-deps dist/*.whl
	touch $@

clean:
	rm -rf .venv .venv-* dist
