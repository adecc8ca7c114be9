# Each target does its own set-up: a virtual environment in .venv, and in it this package with what it needs.
#   make generate   the main job on real input: the reference model goes on from examples/unfinished.py, on a budget
#   make check      style, types and the quick half of the tests: under a minute, for the inner loop
#   make test       the usual tests, side by side on all cores: each value of each parameter once
#   make test-all   all tests: every case, more random ones, browsers, builds, pages as a newcomer runs them
#   make lint       style, types and the rules of imports
#   make bench      the benchmarks, into docs/performance.md; MODEL=build/smollm2: with those of a real checkpoint
#   make docs       the documentation site, into site/; a broken link or anchor, or a page without a place, is an error
#   make pythons    the built wheel on each Python from 3.11 to 3.13 that is found here; ALL=1: all must be
#   make fresh      the commands of README.md and generate.md, and the examples of settings.md, as a newcomer has them: a clone,
#                   an empty home, no packages; some minutes, and a package index; ALL=1: there must be one; AGENTS=FOLDER:
#                   also that Claude Code and opencode, which npm has installed there, change a file
#   make upstream   the tests on the newest mlx, mlx-lm and mlx-vlm, in an environment of its own; TESTS="tests/cache ..."
#   make dist       what a release uploads, into dist/, checked; TAG=v0.4.0: the version must be that
#   make announce   a release on GitHub with this version's part of CHANGELOG.md; TAG=v0.4.0
#   make constraints  constraints.txt and constraints-cuda.txt anew: one version of everything
#   make families   docs/families.md anew, from a walk over all model families of mlx-lm; some minutes

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# On Linux MLX comes with a backend of choice: make EXTRAS=cuda. On macOS it comes with Metal.
EXTRAS ?= $(if $(filter Linux,$(shell uname -s)),cpu)
comma := ,
# What the README shows needs figures and the server as well.
SHOWN := $(if $(EXTRAS),$(EXTRAS)$(comma))plot,server

.PHONY: generate check test test-all lint bench docs pythons fresh upstream dist announce constraints families clean

generate: $(VENV)/.run
	$(VENV)/bin/mlx-kv generate --prompt-file examples/unfinished.py --kv-budget 512 --kv-bits 8 --max-tokens 40

check: lint
	HYPOTHESIS_PROFILE=quick $(VENV)/bin/python -m pytest --numprocesses auto --dist worksteal --quick

test: $(VENV)/.test
	HYPOTHESIS_PROFILE=usual $(VENV)/bin/python -m pytest --numprocesses auto --dist worksteal --cover

test-all: $(VENV)/.dev
	$(VENV)/bin/python -m pytest --numprocesses auto --dist worksteal

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(VENV)/.run
	$(VENV)/bin/python tools/performance.py $(if $(MODEL),--model $(MODEL))

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 SOURCE_DATE_EPOCH=0 $(VENV)/bin/python -m mkdocs build --quiet
	@echo "site/index.html"

pythons: $(VENV)/.dev
	$(VENV)/bin/python tools/pythons.py $(if $(ALL),--all)

fresh: | $(VENV)/bin/python
	$(VENV)/bin/python tools/fresh.py $(if $(ALL),--all) $(if $(AGENTS),--agents $(AGENTS))

upstream: $(VENV)/.dev
	$(VENV)/bin/python tools/upstream.py $(if $(PROCESSES),--processes $(PROCESSES)) $(TESTS)

dist: $(VENV)/.dev
	@$(VENV)/bin/python -c "import sys, mlx_kv; tag, own = sys.argv[1], 'v' + mlx_kv.__version__; \
	sys.exit(f'the tag {tag} is not that of this version: {own}' if tag not in ('', own) else 0)" "$(TAG)"
	rm -rf dist
	$(VENV)/bin/python -m build --outdir dist .
	MLX_KV_DIST="$(CURDIR)/dist" $(VENV)/bin/python -m pytest tests/test_wheel.py

announce:
	@awk '/^## \[/{on = index($$0, "[$(TAG:v%=%)]")} on' CHANGELOG.md | sed 's|](docs/|](../../blob/$(TAG)/docs/|g' \
	  | gh release create "$(TAG)" --verify-tag --title "mlx-kv $(TAG:v%=%)" --notes-file -

constraints: $(VENV)/.dev
	$(VENV)/bin/python tools/constraints.py

families: $(VENV)/.dev
	$(VENV)/bin/python tests/mlxlm/family_table.py --write

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "mlx-kv needs Python 3.11 or later on the PATH, or make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# Nothing is compiled that is not imported: most of what the packages bring never is.
INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile

$(VENV)/.run: pyproject.toml mlx_kv/__init__.py | $(VENV)/bin/python
	$(INSTALL) -e ".[$(SHOWN)]"
	@touch $@

$(VENV)/.test: pyproject.toml mlx_kv/__init__.py | $(VENV)/bin/python
	$(INSTALL) -e ".[$(SHOWN),test]"
	@touch $@ $(VENV)/.run

$(VENV)/.dev: pyproject.toml mlx_kv/__init__.py | $(VENV)/bin/python
	$(INSTALL) -e ".[$(SHOWN),test,dev,vision]"
	@touch $@ $(VENV)/.run $(VENV)/.test

$(VENV)/.docs: pyproject.toml mlx_kv/__init__.py | $(VENV)/bin/python
	$(INSTALL) -e ".[$(if $(EXTRAS),$(EXTRAS)$(comma))docs]"
	@touch $@

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
