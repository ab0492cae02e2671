# `make setup` creates `.venv`. Most other targets run it first; it does nothing if `.venv` is up to date.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
# One more than there are cores, because tests also wait for the processes that they start.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
PYTHON_CODE := disagg harness tests examples benchmarks scripts/generate_docs.py scripts/docs_blocks.py scripts/docs_charts.py scripts/docs_figures.py scripts/docs_pictures.py scripts/docs_site.py scripts/sizes.py
# Cached bytecode halves what a process takes to start. A container may ask Python to write none.
unexport PYTHONDONTWRITEBYTECODE
CXX_CODE = $(shell find csrc -name '*.hpp' -o -name '*.cpp')

.PHONY: help setup demo chaos turns fuzz soak test test-release test-chaos test-models test-vllm test-vllm-moves test-vllm-once test-vllm-next demo-vllm test-sglang test-cross test-rdma chaos-rdma check format coverage coverage-report docs docs-shots build wheels wheels-test wheel-test sanitize gpu-test gpu-bench clean distclean

help: ## List all targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

setup: ## Create the virtual environment, install packages, build the extension module
	@scripts/setup.sh

demo: setup ## Run a prefill and a decode instance with different layouts over real engines
	@$(BIN)/python -m disagg.commands.bench.demo

chaos: setup ## Kill, stop and cut off ranks for each engine and check every byte (CHAOS_ARGS=... for the program)
	@$(BIN)/python -m harness.chaos $(CHAOS_ARGS)

turns: setup ## Compare 10,000 answers of vLLM and of SGLang in long conversations with one server's, for hours (TURNS_ARGS=...)
	@$$(scripts/vllm_env.sh) -W ignore -m harness.turns --engine vllm --answers 10000 $(TURNS_ARGS)
	@python=$$(scripts/sglang_env.sh) && $$python -W ignore -m harness.turns --engine sglang --answers 10000 $(TURNS_ARGS)

fuzz: setup ## Feed damaged inputs to decoders and live ranks for some minutes (FUZZ_ARGS=... for the program)
	@$(BIN)/python -m harness.fuzz --inputs 1000000 --port 1000000 --jobs 2 $(FUZZ_ARGS)

soak: setup ## Run pairs of vLLM and of SGLang servers for an hour each, and fail if a process grows (SOAK_ARGS="--minutes 10")
	@$$(scripts/vllm_env.sh) -W ignore -m harness.soak_servers --engine vllm $(SOAK_ARGS)
	@python=$$(scripts/sglang_env.sh) && $$python -W ignore -m harness.soak_servers --engine sglang $(SOAK_ARGS)

test: setup ## Run the tests; a missing engine fails instead of skipping (PYTEST_ARGS=... for pytest, COVERAGE=1 measures it)
	@TEST_REQUIRE_ENGINES=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  -m "not nightly and not chaos and not release" $(if $(COVERAGE),--cov --cov-report= --cov-fail-under=0) $(PYTEST_ARGS)

test-release: setup ## Test what a release has besides: the site in a browser, wheels, alerts, deployment, third-party engines
	@TEST_REQUIRE_ENGINES=1 $(BIN)/pytest -q --numprocesses $(WORKERS) --dist loadfile -m release tests/deploy tests/docs tests/examples $(PYTEST_ARGS)

test-chaos: setup ## Run the tests that kill and replace ranks under load, one after the other
	@TEST_REQUIRE_ENGINES=1 $(BIN)/pytest -q -m chaos tests/harness $(PYTEST_ARGS)

test-models: setup ## Compare tokens and logits of every described model, and move every kind of state between processes
	@TEST_REQUIRE_ENGINES=1 $(BIN)/pytest -q --numprocesses $(WORKERS) tests/models/test_equal_tokens.py \
	  tests/examples/test_transformers_pd.py tests/commands/test_bench_processes.py $(PYTEST_ARGS)

vllm_options = -c tests/integrations/vllm/pytest.ini --rootdir . --confcutdir tests/integrations
vllm_pytest = $$(scripts/vllm_env.sh) -m pytest $(vllm_options) -m "not nightly"
vllm_moves = $(foreach name,hosts kept moves turns,tests/integrations/vllm/test_$(name).py)

test-vllm: ## Run the tests of the vLLM connector on real engines, in an environment of their own (4 GB, built once)
	@$(vllm_pytest) tests/integrations/vllm $(PYTEST_ARGS)

test-vllm-moves: ## Run those of test-vllm about next turns, requests that move, random requests, and another host
	@$(vllm_pytest) $(vllm_moves) $(PYTEST_ARGS)

test-vllm-once: ## Run the others of test-vllm: state that moves once
	@$(vllm_pytest) tests/integrations/vllm $(addprefix --ignore ,$(vllm_moves)) $(PYTEST_ARGS)

test-vllm-next: ## Run the same tests with the Python files of vLLM 0.33 and the CPU kernels of 0.32, and servers of both versions
	@python=$$(scripts/vllm_env.sh) && next=$$(scripts/vllm_next_env.sh) && \
	  TEST_OTHER_VLLM=$$next $$python -m pytest $(vllm_options) tests/integrations/vllm/test_versions.py $(PYTEST_ARGS) && \
	  PYTHONPATH=$$next $$python -m pytest $(vllm_options) -m "not nightly" tests/integrations/vllm $(PYTEST_ARGS)

demo-vllm: ## Run vLLM servers that prefill and decode with different layouts, and a proxy in front of them
	@$$(scripts/vllm_env.sh) -W ignore -m harness.vllm.demo

test-sglang: setup ## Test the integration with SGLang, real servers included, in an environment of its own (PYTEST_ARGS=...)
	@python=$$(scripts/sglang_env.sh) && TEST_REQUIRE_SGLANG=1 $$python -m pytest -W ignore -o faulthandler_timeout=600 --durations 5 \
	  tests/integrations/sglang $(PYTEST_ARGS)

test-cross: setup ## Test vLLM and SGLang servers that hand requests over to each other, in the environments of both (PYTEST_ARGS=...)
	@SGLANG_PYTHON=$$(scripts/sglang_env.sh) && export SGLANG_PYTHON && $$(scripts/vllm_env.sh) -m pytest \
	  -c tests/integrations/cross/pytest.ini --rootdir . --confcutdir tests/integrations tests/integrations/cross $(PYTEST_ARGS)

test-rdma: setup ## Run the tests over soft RDMA devices in a virtual machine, fetched from Debian's packages (PYTEST_ARGS=..., RDMA_ARGS=...)
	@PYTEST_ADDOPTS="$(PYTEST_ADDOPTS) $(PYTEST_ARGS)" $(BIN)/python -m harness.rdma $(RDMA_ARGS)

chaos-rdma: setup ## Kill ranks, lose packets and take devices down over soft RDMA devices (CHAOS_ARGS=... for the program)
	@$(BIN)/python -m harness.rdma --timeout 7200 -- $(BIN)/python -m harness.chaos --transport rdma --rounds 12 --requests 1000 --slow 6 $(CHAOS_ARGS)

check: setup ## Check format, lint, types and the direction of imports
	@echo "check: format of Python"; $(BIN)/ruff format --check --quiet --output-format concise $(PYTHON_CODE)
	@echo "check: lint"; $(BIN)/ruff check --quiet --output-format concise $(PYTHON_CODE)
	@echo "check: types, by mypy, and by pyright as users of the examples and of the pages' Python see them"
	@$(BIN)/python scripts/docs_blocks.py out/blocks
	@$(BIN)/basedpyright --level error >out/pyright.log 2>&1 & pyright=$$!; \
	  $(BIN)/mypy --no-error-summary $(PYTHON_CODE); $(BIN)/mypy --no-error-summary out/blocks/*.py; \
	  wait $$pyright || { cat out/pyright.log; exit 1; }
	@echo "check: direction of imports"; $(BIN)/lint-imports | grep -E 'KEPT|BROKEN|->|not allowed|Contracts:|rror'
	@echo "check: long files, classes and functions (a hint for reviewers)"; $(BIN)/python scripts/sizes.py
	@echo "check: format of C++"; $(BIN)/clang-format --dry-run -Werror $(CXX_CODE)

format: setup ## Format Python and C++
	@$(BIN)/ruff format --quiet $(PYTHON_CODE)
	@$(BIN)/ruff check --quiet --fix $(PYTHON_CODE)
	@$(BIN)/clang-format -i $(CXX_CODE)

coverage: setup ## Measure branch coverage of the pure core by its own tests
	@$(BIN)/pytest -q --numprocesses $(WORKERS) --dist loadfile --cov --cov-report= --cov-fail-under=0 $(addprefix tests/,core layout models protocol state)
	@$(BIN)/coverage report

coverage-report: setup ## Report the coverage of the last `make test COVERAGE=1`
	@$(BIN)/coverage report

docs: setup ## Build the documentation site in site/; tests/docs checks the pages
	@echo "docs: building the site"; NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

docs-shots: docs ## Write pictures of every page at three widths to out/shots, and name what does not fit
	@$(BIN)/python -m harness.site out/shots

build: setup ## Build the source distribution and the wheel in dist/
	@echo "build: source distribution and wheel"; rm -rf dist
	@$(BIN)/python -m build --no-isolation . >build.log 2>&1 || { tail -n 40 build.log >&2; exit 1; }
	@rm -f build.log; ls dist

wheels: ## Build wheels of a release for x86-64 and aarch64 in dist/, without containers (PYTHONS=..., ARCHS=...)
	@scripts/wheels.sh

wheels-test: setup wheels ## Test the wheels of `make wheels` in Python 3.11 to 3.14, on aarch64 under emulation
	@$(BIN)/python -m harness.wheels

wheel-test: build ## Test the wheel in clean environments of every installed Python from 3.11 to 3.14, outside the source tree
	@$(BIN)/python -m harness.wheels --installed

gpu-test: ## Run the tests that need two NVIDIA GPUs (PYTHON=... names the interpreter)
	@STEPS=tests scripts/gpu_all.sh

gpu-bench: ## Run the kill test and the benchmarks on two NVIDIA GPUs; results in out/gpu
	@STEPS="kill bench request engines models" scripts/gpu_all.sh

sanitize: setup ## Run the C++ tests under the address and undefined-behaviour sanitizers
	@echo "sanitize: building"
	@$(BIN)/cmake -S . -B build/sanitize -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DDISAGG_STRICT=ON -DDISAGG_SANITIZE=ON -DDISAGG_TESTS=ON -DDISAGG_PYTHON_MODULE=OFF >/dev/null
	@$(BIN)/cmake --build build/sanitize -- --quiet
	@build/sanitize/test_headers

clean: ## Remove builds and the caches of tools
	@rm -rf build dist site *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache .coverage .coverage.* htmlcov
	@find disagg harness tests benchmarks $(wildcard examples) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Also remove the virtual environment
	@rm -rf .venv .venv-vllm
