# Each target sets up what it needs in .venv from a bare Python 3.11 or newer; none needs another to have run before.
# PYTHON names the interpreter to build .venv from: make test PYTHON=python3.12

PYTHON ?= python3
WORKERS ?= 2

BIN := .venv/bin
STAMPS := .venv/.stamps
DEMO_CONFIG := sample_runs/feed-forward-overflow/nanprobe.yaml

# One PyTorch for everybody who builds from here, so that figures in tests and docs can be repeated.
TORCH := torch==2.13.0

.PHONY: demo test lint bench diagnosis fuzz catalogue clean

demo: $(STAMPS)/run
	@$(BIN)/nanprobe compare-precisions --config $(DEMO_CONFIG); code=$$?; \
	if [ $$code -eq 1 ]; then \
	  echo "Exit code 1 means \"ran to the end and found something\"; that is what this sample run is for." >&2; \
	elif [ $$code -eq 0 ]; then \
	  echo "demo: expected the overflow to be found (exit code 1), but the replay was clean" >&2; exit 1; \
	else exit $$code; fi

test: $(STAMPS)/test
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(STAMPS)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/interrogate nanprobe

bench: $(STAMPS)/run
	$(BIN)/python -m benchmarks

# Faults that people reported, and what nanprobe and four other tools name on them; the page is docs/diagnosis-suite.md.
diagnosis: $(STAMPS)/peers
	$(BIN)/python -m benchmarks.diagnosis --peers

# Damaged checkpoints of every format, for as long as one likes: make fuzz SECONDS=600
SECONDS ?= 60
fuzz: $(STAMPS)/test
	$(BIN)/python -m tests.checkpoints.mutation $(SECONDS)

# The page is what `explain` prints; a test fails when it is older than the entries.
catalogue: $(STAMPS)/run
	$(BIN)/python -m nanprobe explain --verbose --format markdown -o docs/catalogue.md

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "nanprobe needs Python 3.11 or newer; name one with: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	@mkdir -p $(STAMPS) && touch $@

# Installed by itself and first, so that nothing below can settle on another build of it.
$(STAMPS)/torch: $(STAMPS)/venv
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	@touch $@

$(STAMPS)/run: pyproject.toml $(STAMPS)/torch
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(STAMPS)/peers: pyproject.toml $(STAMPS)/torch
	$(BIN)/python -m pip install --quiet -e '.[peers]' "$(TORCH)"
	@touch $@

$(STAMPS)/test: pyproject.toml $(STAMPS)/torch
	$(BIN)/python -m pip install --quiet -e '.[test]' "$(TORCH)"
	@touch $@
