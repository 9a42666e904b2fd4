# Each target does all its own set-up in .venv. PYTHON may name another interpreter (>= 3.10).
PYTHON ?= python3
BIN := .venv/bin
# Two test processes with two threads each would spin against each other.
TEST_JOBS ?= 2

.PHONY: demo test test-wide test-all lint sanitize wheel clean

demo: .venv/ready
	$(BIN)/qknorm compare runs/demo --arm none --arm qk --lr 3e-2 --overwrite

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_JOBS)

# The rest: large grids of which `make test` runs the corners.
test-wide: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_JOBS) --dist loadgroup -m wide

test-all: test test-wide

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The C++ backend under AddressSanitizer, UndefinedBehaviorSanitizer and valgrind; needs g++ and valgrind.
sanitize: .venv/ready
	$(BIN)/python tests/ops/sanitize.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable . --group dev
	touch $@

# One wheel for every Python and every torch from 2.10 on; without a compiler it lacks the cpu backend.
wheel: .venv/ready
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .venv build dist runs
