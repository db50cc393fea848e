# Needs: Python >= 3.10 with venv, make, a C++ compiler. Everything else goes into $(VENV).
PYTHON ?= python3
VENV ?= .venv
# Test processes side by side. Those in tests/exec start threads of their own.
WORKERS ?= 2

.PHONY: test test-onnx fuzz test-aarch64 demo bench clean

test: $(VENV)/.installed-test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy tvmfuse
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

# ONNX's own test suite, all of it; `make test` runs a sixth. With RESULTS=FILE a run that was cut short goes on where it was.
test-onnx: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.exec.onnx_suite $(if $(RESULTS),--results $(RESULTS))

# Random models; FUZZ_SEED repeats a run. A failure is shrunk, and printed as ONNX text.
FUZZ ?= 20000
FUZZ_SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
fuzz: $(VENV)/.installed-test
	@echo "FUZZ_SEED=$(FUZZ_SEED)"
	FUZZ=$(FUZZ) FUZZ_SEED=$(FUZZ_SEED) $(VENV)/bin/python -m pytest -n $(WORKERS) tests/exec/test_random_models.py

# Under emulation: as root on Debian, seven minutes and 1.5 GB of packages at first.
AARCH64_ROOT ?= .aarch64
test-aarch64: $(VENV)/.installed-test
	tests/aarch64/make_root.sh $(AARCH64_ROOT) $(VENV)/bin/python
	TVMFUSE_AARCH64_ROOT=$(AARCH64_ROOT) $(VENV)/bin/python -m pytest tests/aarch64

demo: $(VENV)/.installed-demo
	$(VENV)/bin/tvmfuse demo

bench: $(VENV)/.installed-bench
	$(VENV)/bin/python -m bench

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find tvmfuse tests bench -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.installed-%: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there: install Python 3.10 or newer, or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is too old: Python 3.10 or newer is needed; say make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	@for compiler in "$$CXX" c++ g++ clang++; do command -v "$$compiler" >/dev/null && exit 0; done; echo "no C++ compiler (c++, g++ or clang++) is there: install one (Debian, Ubuntu: g++; macOS: xcode-select --install)" >&2; exit 1
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[$*]'
	@touch $@
