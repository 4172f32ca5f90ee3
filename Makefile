# `make demo` and `make test` need nothing before them: each makes its virtual environment, installs and builds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find ffi -type f) CMakeLists.txt pyproject.toml

.PHONY: demo test lint test-gpu test-matrix cuda-archs clean
.DELETE_ON_ERROR:

# Editable: Python files are used as they are, and this stamp rebuilds the C++ when it changes.
$(VENV)/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/tools: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test,lint,plot]"
	touch $@

checkpoints/tiny/config.json: checkpoints/make_tiny.py | $(VENV)/installed
	$(BIN)/python checkpoints/make_tiny.py checkpoints/tiny

demo: $(VENV)/installed checkpoints/tiny/config.json
	$(BIN)/muse-jax generate checkpoints/tiny --max-new-tokens 32 --check

lint: $(VENV)/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'ffi/*.h' 'ffi/*.cc' 'ffi/*.cu' 'ffi/*.cuh')
	$(BIN)/pyright --pythonpath $(BIN)/python

test: $(VENV)/tools checkpoints/tiny/config.json lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Everything on the GPUs at hand, against the CPU's bits.
test-gpu: $(VENV)/tools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test,cuda]"
	@if $(BIN)/python -c "import jax; jax.devices('gpu')" 2>/dev/null; then \
	  XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_PLATFORMS=cuda,cpu $(BIN)/python -m pytest -v tests/gpu; \
	else echo "test-gpu: JAX sees no GPU here, nothing was run"; fi

# The oldest supported pair, the release that GPU machines have, and the newest.
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) python3.12)
test-matrix:
	$(MAKE) .matrix/py311-jax0.10.2 MATRIX_PYTHON="$(PYTHON)" MATRIX_JAX="jax==0.10.2 jaxlib==0.10.2"
	$(MAKE) .matrix/py312-jax0.11.2 MATRIX_PYTHON="$(PYTHON312)" MATRIX_JAX="jax==0.11.2 jaxlib==0.11.2"
	$(MAKE) .matrix/py312-newest MATRIX_PYTHON="$(PYTHON312)" MATRIX_JAX="jax<0.13 jaxlib<0.13"

.PHONY: .matrix/py311-jax0.10.2 .matrix/py312-jax0.11.2 .matrix/py312-newest
.matrix/%: checkpoints/tiny/config.json
	test -x $@/bin/python || $(MATRIX_PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check $(foreach p,$(MATRIX_JAX),"$(p)") --editable ".[test]"
	$@/bin/python -c "import sys, jax; print('Python', sys.version.split()[0], 'jax', jax.__version__)"
	$@/bin/python -m pytest -n 2 --dist loadfile

# Every kernel for every architecture that the wheel may name; a warning, a spilled register or a stack frame is an error.
CUDA_ARCHS ?= 90a 100a 103a
CUDA_KERNELS := $(shell find ffi -name '*.cu')
NVCC_FLAGS := -std=c++17 -O3 -I. --fmad=false -prec-div=true -prec-sqrt=true -ftz=false -Werror all-warnings \
  -Xptxas -Werror,-warn-spills,-warn-lmem-usage -Xcompiler -Wall,-Wextra,-Werror

cuda-archs: $(foreach a,$(CUDA_ARCHS),$(CUDA_KERNELS:%.cu=build/cuda-archs/$(a)/%.o))

define CUDA_ARCH
build/cuda-archs/$(1)/%.o: %.cu $(SOURCES)
	@mkdir -p $$(@D)
	nvcc $$(NVCC_FLAGS) -gencode=arch=compute_$(1),code=sm_$(1) -c $$< -o $$@
endef
$(foreach a,$(CUDA_ARCHS),$(eval $(call CUDA_ARCH,$(a))))

clean:
	rm -rf $(VENV) .matrix build checkpoints/tiny
