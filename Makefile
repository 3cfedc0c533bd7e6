# make demo   train a small model on the Python standard library within four minutes
# make tour   the whole line on a small model: pretrain, continue, fine-tune, DPO, chat, serve, convert
# make test   lint, type check and all tests
# make test-faults   kills, signals, full disks and damaged files, by the hundred: about half an hour
# make test-mutants   known bugs put into a copy of the source, which its tests must notice
# make test-slow   what takes minutes: exported models in llama.cpp itself, the chat's page in Chromium,
#                  20,000 requests and 1,000 vanishing clients for the server
# make test-gpu   the methods, families, runs and servers on a CUDA GPU; DEVICE=cpu runs what a CPU can
#                 of them. In an environment of your own: python -m pytest -m gpu tests/gpu
# Each makes .venv and installs what it needs into it; a second call reuses it.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Two processes of one thread each: most tests keep no more than one busy, and threads of two that
# wait for each other on the same cores are slower than none.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal

.PHONY: demo tour test test-faults test-mutants test-slow test-gpu clean

demo: .venv/demo-ready
	$(BIN)/firstlight train stdlib --budget 4m

# FILES="a.json b.json": further instructions to learn.
tour: .venv/tour-ready
	$(BIN)/python scripts/tour.py $(FILES)

test: .venv/test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST)

test-faults: .venv/test-ready
	FIRSTLIGHT_FAULTS=full $(PYTEST) tests/faults --timeout 2400

test-mutants: .venv/test-ready
	$(BIN)/python scripts/mutants.py

test-slow: .venv/slow-ready
	$(BIN)/pytest -m slow

# Two processes share the GPU: a test is mostly Python that starts kernels, or compiles them.
DEVICE := cuda
test-gpu: .venv/test-ready
	FIRSTLIGHT_TEST_DEVICE=$(DEVICE) $(PYTEST) -m gpu tests/gpu

# torch first and pinned: asked for by another package, it could come as another build.
.venv/demo-ready: constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "firstlight needs Python 3.11 or newer: install it, or make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) --editable .
	touch $@

.venv/tour-ready: .venv/demo-ready
	$(PIP) --editable '.[serve]' gguf
	touch $@

.venv/test-ready: .venv/demo-ready
	$(PIP) --editable '.[dev]'
	touch $@

# llama.cpp is built from source: some minutes, with a C++ compiler and cmake. The browser is
# Debian's (apt install chromium); without it, its tests are skipped.
.venv/slow-ready: .venv/test-ready
	$(PIP) --editable '.[llama-cpp,chat]' playwright
	touch $@

clean:
	rm -rf .venv demo tour build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
