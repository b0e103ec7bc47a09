# Everything a person types. A target is named for what it proves or does; its comment is the help text.

.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

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
	@$(PY) -m pytest tests -m integration -q --durations=10

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
