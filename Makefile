# Everything a person types. A target is named for what it proves or does; its comment is the help text.

.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(READY): setup.cfg setup.py requirements.txt requirements-dev.txt tools/make-venv
	@tools/make-venv $(VENV)
	@touch $@

.PHONY: venv
venv: $(READY) ## make .venv with everything that the other targets need

.PHONY: demo
demo: $(READY) ## real requests through a real RabbitMQ, a model server, a real Redis, MetricServer and Croesus
	@$(PY) -m devstack.demo

.PHONY: up
up: $(READY) ## keep that stack and a worker in the foreground; Ctrl-C ends it
	@$(PY) -m devstack.up

PROMPT ?= Say hello.
.PHONY: ask
ask: $(READY) ## send one request to the running stack: make ask PROMPT="..."
	@$(PY) -m devstack.ask "$$ASKED"
# as it was typed: make would take a $ in it for a variable of its own
export ASKED := $(value PROMPT)

.PHONY: test
test: $(READY) ## unit and contract tests: fakeredis, a stubbed pika channel, no servers; under a minute
	@$(PY) -m pytest tests -m "not integration" -q -n auto --cov --cov-report=term:skip-covered

.PHONY: integration
integration: $(READY) ## the same laws on a real RabbitMQ and a real Redis, which are installed when missing
	@$(PY) -m devstack.install
	@$(PY) -m pytest tests -m "integration and not slow" -q --durations=10

.PHONY: integration-slow
integration-slow: $(READY) ## those that take a minute or more each, ten minutes in all; not in CI
	@$(PY) -m devstack.install
	@$(PY) -m pytest tests -m "integration and slow" -q --durations=10

NEXT := .devstack/rabbitmq-next
.PHONY: integration-next
integration-next: $(READY) ## make integration on RabbitMQ 4.3, in a chroot that is made when missing: root, Debian; not in CI
	@$(PY) -m devstack.rabbitmq_next $(NEXT)
	@DEVSTACK_RABBITMQ_ROOT=$(NEXT)/root $(PY) -m pytest tests -m "integration and not slow" -q --durations=10

FUZZ_VENV := .devstack/fuzz/venv
$(FUZZ_VENV)/.ready: $(READY) requirements.txt tests/fuzz/requirements.txt
	@$(PY) -m venv --clear $(FUZZ_VENV)
	@$(FUZZ_VENV)/bin/python -m pip install -q --disable-pip-version-check -r requirements.txt -r tests/fuzz/requirements.txt
	@touch $@

RUNS ?= 10000000
.PHONY: fuzz
fuzz: $(FUZZ_VENV)/.ready ## coverage-guided fuzzing of every decoder: RUNS=10000000 inputs in half an hour, on one core
	@nice -n 10 $(FUZZ_VENV)/bin/python -m tests.fuzz.run --runs $(RUNS)

.PHONY: e2e-vllm
e2e-vllm: $(READY) ## the worker against a real vLLM on the CPU; not in CI: 3 GB the first time, then ten minutes
	@$(PY) -m devstack.install
	@$(PY) -m tests.vllm

FAULTS ?= 200
QUEUE_TYPE ?= classic
# of the random part; without one it is of the clock, and printed
SEED ?=
MINUTES ?= 60
FAULT_RUN = $(PY) -m tests.faults.run --queue-type $(QUEUE_TYPE) $(if $(SEED),--seed $(SEED))
.PHONY: faults
faults: $(READY) ## FAULTS=200 faults under load, and count what became of every request: QUEUE_TYPE=classic|quorum SEED=n
	@$(PY) -m devstack.install
	@$(FAULT_RUN) --faults $(FAULTS)

.PHONY: faults-quick
faults-quick: $(READY) ## many kinds of fault once, in three minutes; part of CI
	@$(PY) -m devstack.install
	@$(FAULT_RUN) --quick

.PHONY: soak
soak: $(READY) ## faults at random for MINUTES=60, watching memory, threads and descriptors
	@$(PY) -m devstack.install
	@$(FAULT_RUN) --soak $(MINUTES)

.PHONY: faults-report
faults-report: $(READY) ## write docs/reliability.md from the runs so far
	@$(PY) -m tests.faults.run --report

.PHONY: bench
bench: $(READY) ## speed, side by side with the bare loop, dramatiq, Celery, aio-pika; writes docs/performance.md; 40 minutes
	@$(PY) -m benchmarks.run

.PHONY: bench-quick
bench-quick: $(READY) ## the worker against the bare loop in 20 seconds; prints the ratios
	@$(PY) -m benchmarks.run --quick

.PHONY: lint
lint: $(READY) ## ruff: errors, import order, format
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

.PHONY: type
type: $(READY) ## mypy, strict on the package
	@$(VENV)/bin/mypy

.PHONY: check
check: lint type test integration demo ## all that must pass before a review

.PHONY: docs
docs: $(READY) ## write the generated parts of README.md and docs/schemas
	@$(PY) -m tools.write_schemas
	@$(PY) -m tools.write_readme

.PHONY: clean
clean: ## remove what the other targets made
	@rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage build dist *.egg-info
