# Every target first makes sure that the environment is there (scripts/setup; about a second when it is).
PY := .venv/bin/python

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */|/' | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

setup:  ## Make .venv ready: shared environment, this checkout installed into it
	@sh scripts/setup

setup-gyms: setup  ## Add reasoning-gym, TextArena and Gymnasium to .venv (needs a C compiler)
	@sh scripts/setup-gyms

setup-environments:  ## Make .venv-verifiers, -openenv, -inspect and -harbor ready: environments with a Python of their own
	@sh scripts/setup-environments

setup-agents:  ## Make .venv-agents ready: the SDKs and agent frameworks that tests run against the proxy
	@sh scripts/setup-agents

setup-coders:  ## Make .venv-coders ready: Claude Code, Codex and other coding agents for `make test-coders` (needs npm)
	@sh scripts/setup-coders

setup-servers:  ## Make .venv-servers ready: MCP servers from npm for long tests (needs npm)
	@sh scripts/setup-servers

setup-peers:  ## Make .venv-peers ready: the gateways that benchmarks/proxy.py measures the proxy against
	@sh scripts/setup-peers

setup-trl:  ## Make .venv-trl ready: what TRL needs so that benchmarks/trainer.py can measure the trainer against it
	@sh scripts/setup-trl

setup-docs:  ## Make .venv-docs ready: the generator of the documentation site
	@sh scripts/setup-docs

setup-lint:  ## Make .venv-lint ready: the linters that are programs of their own
	@sh scripts/setup-lint

setup-verl:  ## Make .venv-verl ready: verl's own functions, which tests compare with ours (2 MB)
	@sh scripts/setup-verl

setup-vllm: setup  ## Make .venv-vllm ready: vLLM for engines with `engine.backend: vllm` on a CPU (2.5 GB)
	@sh scripts/setup-vllm

setup-mutants:  ## Make .venv-mutants ready: mutmut, for `make mutants`
	@sh scripts/setup-mutants

demo: setup  ## Train SmolLM2-135M to use a calculator on this machine, and show the curve
	@.venv/bin/agentrl demo

demo-quick: setup  ## The same with a tiny model and an easier task: a few minutes
	@.venv/bin/agentrl demo --quick

test: setup  ## Run all tests but the long ones, with one real SGLang server
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n auto  # byte code: tests start hundreds of processes

test-long: setup setup-agents  ## Run the long tests: whole runs, clusters, frameworks; coding agents where setup-coders was run: half an hour
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n auto -m "long and not learns and not vllm"

test-thorough: setup  ## Run the property tests with many times as many examples, drawn at random: an hour
	@AGENTRL_TEST_THOROUGH=1 PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --timeout 3600 -m "(hypothesis or searches) and not learns"

coverage: setup setup-gyms setup-agents setup-coders setup-environments setup-servers setup-mutants  ## Run all tests; how many lines and branches of each folder they reach
	@mkdir -p build/coverage && rm -f build/coverage/*
	@export PYTHONPATH=$(CURDIR)/scripts/coverage_start:$$(echo $(CURDIR)/.venv-mutants/lib/python*/site-packages) COVERAGE_FILE=$(CURDIR)/build/coverage/data; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m coverage run -m pytest -n auto -m "not learns and not vllm"; \
	$(PY) -m coverage combine -q && $(PY) -m coverage xml -q -o build/coverage/report.xml; \
	for folder in agentrl agents proxy trainer; do echo "$$folder $$($(PY) -m coverage report --include "$$folder/*" | tail -1)"; done

test-coders: setup setup-coders  ## Run all tests of coding agents (Claude Code, Codex, …), those on real SGLang too: minutes
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest tests/coders -m ""  # those that teach a model too

test-vllm: setup setup-vllm setup-agents  ## Run all tests on a real vLLM server: minutes
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n 0 tests -m "vllm"

lint: setup setup-lint  ## ruff, mypy --strict, import contracts, hadolint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --cache-dir $(or $(AGENTRL_CACHE),$(HOME)/.cache/agentrl)/mypy agentrl tests  # one cache for all checkouts
	$(PY) -c 'from importlinter.cli import lint_imports_command as lint; lint()'
	.venv-lint/bin/hadolint Dockerfile Dockerfile.gpu

docs: setup-docs  ## Build the documentation into site/ and check every link; open site/index.html, no network needed
	@.venv-docs/bin/zensical build --clean --strict
	@.venv-docs/bin/python scripts/check_site.py

bench: setup setup-peers setup-trl  ## Measure store, proxy, trainer, publishing, asynchrony (hours); results go to benchmarks/results
	@AGENTRL_TEST_POSTGRES_URL=$$(sh scripts/postgres) $(PY) benchmarks/store.py --out benchmarks/results/store.json
	@$(PY) benchmarks/proxy.py --out benchmarks/results/proxy.json
	@$(PY) benchmarks/turns.py --out benchmarks/results/turns.json
	@$(PY) benchmarks/wire.py --out benchmarks/results/wire.json
	@$(PY) benchmarks/trainer.py --out benchmarks/results/trainer.json
	@$(PY) benchmarks/attention.py --out benchmarks/results/attention.json
	@$(PY) benchmarks/tree_gain.py --out benchmarks/results/tree_gain.json
	@$(PY) benchmarks/hybrid.py --out benchmarks/results/hybrid.json
	@$(PY) benchmarks/cpu_engine.py --out benchmarks/results/cpu_engine.json
	@$(PY) benchmarks/publish.py --out benchmarks/results/publish.json
	@$(PY) benchmarks/deltas.py --out benchmarks/results/deltas.json
	@$(PY) benchmarks/publish_at_scale.py --out benchmarks/results/publish_at_scale.json
	@$(PY) benchmarks/sharded_publish.py --out benchmarks/results/sharded_publish.json
	@$(PY) benchmarks/batches.py --out benchmarks/results/batches.json
	@$(PY) benchmarks/step_parts.py --out benchmarks/results/step_parts.json
	@$(PY) benchmarks/independent_pulls.py --out benchmarks/results/independent_pulls.json
	@$(PY) benchmarks/estimators.py --out benchmarks/results/estimators.json --figure docs/assets/estimators.png
	@$(PY) benchmarks/distillation.py --out benchmarks/results/distillation.json --figure docs/assets/distillation.png
	@$(PY) benchmarks/overoptimisation.py --out benchmarks/results/overoptimisation.json --figure docs/assets/overoptimisation.png
	@$(PY) benchmarks/bad_agents.py --out benchmarks/results/bad_agents.json
	@$(PY) benchmarks/asynchrony.py --out benchmarks/results/asynchrony.json
	@$(PY) benchmarks/hostile.py --out benchmarks/results/hostile.json
	@$(PY) scripts/benchmark_tables.py > docs/benchmarks.md

gpu:  ## On a GPU machine: the tests and benchmarks that need a GPU, into benchmarks/results/gpu.json (PYTHON=… chooses one)
	@$(or $(PYTHON),$(if $(wildcard .venv-gpu/bin/python),.venv-gpu/bin/python,python3)) benchmarks/gpu.py

gpu-rehearsal: setup  ## Every part of `make gpu` with tiny shapes on the CPU
	@$(PY) benchmarks/gpu.py --rehearse

crash: setup  ## kill -9 to random processes of training runs on both databases, for most of an hour
	@AGENTRL_TEST_POSTGRES_URL=$$(sh scripts/postgres) $(PY) benchmarks/crash.py --out benchmarks/results/crash.json
	@$(PY) scripts/benchmark_tables.py > docs/benchmarks.md

kill-proxy: setup  ## kill -9 to the proxy's workers under load, on both databases
	@AGENTRL_TEST_POSTGRES_URL=$$(sh scripts/postgres) $(PY) benchmarks/kill_proxy.py --out benchmarks/results/kill_proxy.json
	@$(PY) scripts/benchmark_tables.py > docs/benchmarks.md

mutants: setup setup-mutants  ## Change the pure modules in small ways; count the changes that no test notices (an hour; GROUPS="credit forks" for some)
	@$(PY) scripts/mutants.py $(GROUPS)

.PHONY: help setup setup-gyms setup-environments setup-agents setup-coders setup-servers setup-peers setup-trl setup-docs setup-lint setup-verl setup-vllm setup-mutants demo demo-quick test test-long test-thorough coverage test-coders test-vllm lint docs bench gpu gpu-rehearsal crash kill-proxy mutants
