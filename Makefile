# Each target does all its own set-up in .venv. PYTHON may name another interpreter (>= 3.10).
PYTHON ?= python3
BIN := .venv/bin
# Two test processes with two threads each would spin against each other.
TEST_JOBS ?= 2

.PHONY: demo test test-wide test-all lint sanitize docs sdist wheel clean

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
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet .github

# The C++ backend under AddressSanitizer, UndefinedBehaviorSanitizer and valgrind; needs g++ and valgrind.
sanitize: .venv/ready
	$(BIN)/python tests/ops/sanitize.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable . --group dev
	touch $@

# The site, in site/: no broken link or anchor, nothing loaded from elsewhere, the notebook executed.
docs: .venv/docs
	$(BIN)/python docs/figures.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/check_site.py site

sdist: .venv/release
	rm -rf dist
	$(BIN)/python -m build --sdist .
	$(BIN)/twine check --strict dist/*

# One wheel for every Python and every torch from 2.10 on, built from the sdist. With the library of the cpu
# backend it is named for the oldest glibc that the library runs on; without a compiler it lacks that backend
# and is named for any platform.
wheel: sdist
	rm -rf build/wheel
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel dist/*.tar.gz
	case "$$(ls build/wheel)" in \
	(*-any.whl) cp build/wheel/*.whl dist ;; \
	(*) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl && \
	    $(BIN)/auditwheel show dist/*.whl ;; \
	esac
	$(BIN)/twine check --strict dist/*

.venv/docs .venv/release: .venv/%: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --group $*
	touch $@

clean:
	rm -rf .venv build dist runs site
