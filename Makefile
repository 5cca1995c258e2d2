# Everything here works on a fresh clone: the first target that needs it makes `.venv`.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
# For two cores: all but a few wait for other processes half of their time.
PARALLEL := --dist worksteal --numprocesses

# Without files of compiled code each of the many processes that tests start would compile all of headgate.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-quick proof crash simulate soak streams consumers brokers fuzz bench docs check lint proto screenshots lock clean
.PHONY: lint-style lint-mypy lint-pyright

demo: $(READY)  ## the main job on SQLite, with kills: make demo ARGS="--kills 50"
	$(VENV)/bin/headgate demo $(ARGS)

test: $(READY)  ## all tests but those of `make proof`: make test ARGS="-k streams"
	$(VENV)/bin/python -m pytest $(PARALLEL) 4 -m "not campaign" $(ARGS)

QUICK := protocol child streams runner brokers triggers tasks scheduling testing worker
# Whole pairs of processes: they take most of the time, and show little of an interpreter.
SLOW := tests/testing/test_crash* tests/testing/test_demo.py tests/testing/test_poison.py
test-quick: $(READY)  ## the tests without databases: make test-quick VENV=.venv-3.13 PYTHON=python3.13
	$(VENV)/bin/python -m pytest $(PARALLEL) 4 -m "not campaign" $(SLOW:%=--ignore-glob='%') \
		$(addprefix tests/,$(QUICK)) $(ARGS)

PROVING := benchmarks brokers browser integration proof testing
proof: $(READY)  ## whole processes and brokers; campaigns in a bounded form (crash tests, simulation, deliberate bugs, fuzzing)
	$(VENV)/bin/python -m pytest $(PARALLEL) 4 -m campaign $(addprefix tests/,$(PROVING)) $(ARGS)

crash: $(READY)  ## kills at every mark, and at random; adds to docs/proof.md: make crash ARGS="--kills 10000"
	$(VENV)/bin/python -m tests.proof.crash $(ARGS)

SEEDS ?= 2000
simulate: $(READY)  ## both halves in one process, on a clock and a broker of the simulation's: make simulate SEEDS=100000
	$(VENV)/bin/python -m tests.proof.simulation --seeds $(SEEDS) --jobs 2 $(ARGS)

soak: $(READY)  ## an hour of events with a kill of the runner a minute: make soak ARGS="--minutes 10"
	$(VENV)/bin/python -m tests.proof.soak $(ARGS)

streams: $(READY)  ## three supervisors on PostgreSQL, killed one after the other: make streams ARGS="--minutes 1"
	$(VENV)/bin/python -m tests.proof.streams $(ARGS)

consumers: $(READY)  ## a consumer killed 100 times over 50,000 events: make consumers ARGS="--kills 20 --events 5000"
	$(VENV)/bin/python -m tests.proof.consumers $(ARGS)

brokers: $(READY)  ## the crash tests of all brokers' adapters, with kills of the broker: make brokers ARGS="--minutes 10 --only redis"
	$(VENV)/bin/python -m tests.proof.brokers $(ARGS)

fuzz: $(READY)  ## longer than in the tests, guided by coverage with atheris: make fuzz ARGS="--minutes 10 --target core"
	$(VENV)/bin/python -m tests.proof.fuzz $(ARGS)

bench: $(READY)  ## every figure beside its baseline: make bench ARGS="--quick --db sqlite"
	$(VENV)/bin/python -m benchmarks $(ARGS)

docs: $(READY)  ## the tables of docs/deferral.md, from the code
	$(VENV)/bin/python -m tests.documents

check: lint test proof  ## what CI runs

lint: lint-style lint-mypy lint-pyright  ## style, types, and the three-folder rule: make lint --jobs 2 --output-sync

lint-style: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell
	$(VENV)/bin/validate-pyproject pyproject.toml

lint-mypy: $(READY)
	$(VENV)/bin/mypy

lint-pyright: $(READY)
	$(VENV)/bin/pyright

# Installed once; again only when what is pinned or packaged has changed.
$(READY): requirements.lock pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

proto: $(READY)  ## the messages of gRPC, from signals.proto
	$(VENV)/bin/python -m grpc_tools.protoc -I protocol --python_out=protocol --pyi_out=protocol \
		headgate/protocol/signal_rpc/signals.proto

screenshots: $(READY)  ## the pictures of docs/images, with chromium: make screenshots ARGS="--all FOLDER" for all pages
	$(VENV)/bin/python -m tests.browser.screenshots $(ARGS)

lock:  ## pin the newest versions anew (needs uv)
	uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-header \
		--group dev pyproject.toml --output-file requirements.lock

clean:
	rm -rf .venv* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
