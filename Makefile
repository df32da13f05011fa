# Two commands for everybody: `make run` and `make test`. The others are for those who change the code.
PYTHON ?= python3
MODEL ?= smollm2-135m
PYTEST_FLAGS ?= -n 2 --dist loadfile

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
REQUIREMENTS := $(BIN)/python .ci/requirements.py

# Stamps carry a hash of what they were made from, so that an edited, added, deleted or restored file always rebuilds.
hash = $(shell cat $(1) 2>/dev/null | cksum | tr -d ' ')
SOURCES := CMakeLists.txt pyproject.toml README.md LICENSE \
	$(shell find src csrc -type f ! -path '*/__pycache__/*' ! -path '*/.*' ! -name '*.so' | LC_ALL=C sort)
SETUP := pyproject.toml .ci/requirements.py
VENV_MADE := $(VENV)/made
RUNTIME := $(VENV)/runtime-$(call hash,$(SETUP))
TEST_TOOLS := $(VENV)/test-$(call hash,$(SETUP))
INTERCHANGE := $(VENV)/interchange
# What GPTQModel imports; it asks for more, and for other releases than the tests have.
PACKERS_NEED := accelerate datasets defuser device-smi logbar pillow pypcre threadpoolctl tokenicer torchao
INTERCHANGE_TOOLS := $(INTERCHANGE)/tools-$(call hash,$(SETUP))
DEV_TOOLS := $(VENV)/dev-$(call hash,$(SETUP))
INSTALLED := $(VENV)/installed-$(shell (echo $(SOURCES); cat $(SOURCES) 2>/dev/null) | cksum | tr -d ' ')

.DELETE_ON_ERROR:
.PHONY: run test test-gpu interchange install check format wheel clean

run: $(INSTALLED)
	@$(BIN)/paceline pull $(MODEL)
	@$(BIN)/paceline demo

test: $(INSTALLED) $(TEST_TOOLS)
	@$(BIN)/paceline pull $(MODEL)
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# What needs a CUDA GPU, and the Triton kernels compiled for it; `make test` leaves these out or interprets them. Fails where
# torch sees no GPU, for then nothing would have been tested.
test-gpu: $(INSTALLED) $(TEST_TOOLS)
	@$(BIN)/python -c 'import sys, torch; \
		here = torch.cuda.is_available(); \
		print(f"torch {torch.__version__}:", torch.cuda.get_device_name() if here else \
			"no CUDA GPU: nothing to test (is the driver there, and is this a build of torch for CUDA?)"); \
		sys.exit(not here)'
	@$(BIN)/paceline pull $(MODEL)
	$(BIN)/python -m pytest -m gpu tests/triton tests/gpu

# With the programs that our files are for: llama.cpp, which takes ten minutes and more to compile, and, where they can be
# installed, GPTQModel and AutoAWQ, whose tests are skipped otherwise.
interchange: $(INSTALLED) $(INTERCHANGE_TOOLS)
	@$(BIN)/paceline pull $(MODEL)
	$(INTERCHANGE)/bin/python -m pytest tests/interchange tests/golden/test_gptq_awq_packers.py

install: $(INSTALLED)

# Everything that needs no build: style, types, layers.
check: $(DEV_TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find csrc -name '*.h' -o -name '*.cpp' | xargs -r $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports

format: $(DEV_TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc -name '*.h' -o -name '*.cpp' | xargs -r $(BIN)/clang-format -i

wheel: $(RUNTIME)
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist

# The system's Python may come without ensurepip; then its own pip fills the environment.
$(VENV_MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Paceline needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' \
		|| { echo "Python's headers are missing: install the package python3-dev (or python3-devel)." >&2; exit 1; }
	@echo "Making $(VENV)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; } \
		|| { echo "Neither ensurepip nor pip is there for $(PYTHON): install the package python3-venv." >&2; exit 1; }
	@touch $@

$(RUNTIME): | $(VENV_MADE)
	@echo "Installing what the package and its server need"
	@rm -f $(VENV)/runtime-*
	@$(REQUIREMENTS) runtime serve build >$@.part && $(PIP) install -r $@.part
	@$(REQUIREMENTS) build-tools >$@.part && { [ ! -s $@.part ] || $(PIP) install -r $@.part; }
	@mv $@.part $@

$(TEST_TOOLS): | $(RUNTIME)
	@echo "Installing what the tests need"
	@rm -f $(VENV)/test-*
	@$(REQUIREMENTS) runtime serve test >$@.part && $(PIP) install -r $@.part
	@mv $@.part $@

# An environment of its own over that of the tests, which stays as it is whatever these packages want.
$(INTERCHANGE_TOOLS): | $(TEST_TOOLS)
	@echo "Installing what other programs' files are compared with (ten minutes and more)"
	@rm -rf $(INTERCHANGE)
	@$(PYTHON) -m venv --without-pip $(INTERCHANGE)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>"$$($(INTERCHANGE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
	@$(REQUIREMENTS) interchange >$(INTERCHANGE)/requirements
	@$(PIP) --python $(INTERCHANGE)/bin/python install -r $(INTERCHANGE)/requirements
	@{ $(PIP) --python $(INTERCHANGE)/bin/python install 'setuptools>=77' wheel $(PACKERS_NEED) \
		&& $(PIP) --python $(INTERCHANGE)/bin/python install --no-deps --no-build-isolation gptqmodel autoawq; } \
		|| echo "GPTQModel or AutoAWQ cannot be installed here: their tests will be skipped"
	@touch $@

$(DEV_TOOLS): | $(RUNTIME)
	@echo "Installing the checkers"
	@rm -f $(VENV)/dev-*
	@$(REQUIREMENTS) dev >$@.part && $(PIP) install -r $@.part
	@mv $@.part $@

# Not editable: what is tested and run is what a wheel would hold. The build folder stays, so only what changed is compiled.
# Ninja goes by times alone: a file whose content differs from the last build is touched, or an older one put back would go unseen.
$(INSTALLED): | $(RUNTIME)
	@echo "Building and installing Paceline (a few minutes the first time)"
	@rm -f $(VENV)/installed-*
	@mkdir -p build && touch build/sources
	@cksum $(SOURCES) | LC_ALL=C sort >build/sources.new
	@LC_ALL=C comm -13 build/sources build/sources.new | awk '{print $$3}' | xargs touch && mv build/sources.new build/sources
	@$(PIP) install --no-build-isolation --no-deps --force-reinstall .
	@touch $@
