# `make demo` and `make test` need nothing before them: each makes its virtual environment, installs and builds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find ffi tests/simulator -type f) CMakeLists.txt pyproject.toml

.PHONY: demo test test-slow lint docs test-gpu gpu-suite test-matrix cuda-archs clean
.DELETE_ON_ERROR:

# The CUDA kernels for tests/simulator too.
SIMULATOR = -C cmake.define.MUSE_SIMULATOR=ON

# Editable: Python files are used as they are, and these stamps rebuild the C++ when it changes. The second brings what tests
# and lint need and stands for the first, so that `make test` alone builds once.
INSTALL = test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(VENV)/installed: $(SOURCES)
	$(INSTALL) --editable .
	touch $@

$(VENV)/tools: $(SOURCES)
	$(INSTALL) --editable ".[test,lint,plot,docs]" $(SIMULATOR)
	touch $(VENV)/installed $@

PAIR := checkpoints/pair

demo: $(VENV)/installed
	$(BIN)/muse-jax generate $(PAIR)/target --draft $(PAIR)/draft --prompt "class TestStack(unittest.TestCase):" --max-new-tokens 96 --check

docs: $(VENV)/tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cc' '*.cu' '*.cuh')
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Checkpoints of the released shapes, and the wheel in an environment of its own: about 45 GB of disk below pytest's temporary
# folder, 30 minutes.
test-slow: $(VENV)/tools
	$(BIN)/python -m pytest -m slow -s

# Everything on the GPUs at hand, against the CPU's bits; ends with a table.
test-gpu:
	@if nvidia-smi --list-gpus >/dev/null 2>&1; then $(MAKE) --no-print-directory gpu-suite; \
	else echo "test-gpu: no GPU here (nvidia-smi lists none), nothing was run"; fi

gpu-suite: $(VENV)/tools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test,cuda]"
	XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_PLATFORMS=cuda,cpu $(BIN)/python -m pytest -n 4 --dist worksteal tests/gpu

# The oldest supported pair, the release that GPU machines have, and the newest; $(call matrix,name,python,jax).
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) python3.12)
define matrix
	test -x .matrix/$(1)/bin/python || $(2) -m venv .matrix/$(1)
	.matrix/$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(3) --editable ".[test,docs]" $(SIMULATOR)
	.matrix/$(1)/bin/python -c "import sys, jax; print('Python', sys.version.split()[0], 'jax', jax.__version__)"
	.matrix/$(1)/bin/python -m pytest -n 2 --dist loadfile
endef

test-matrix:
	$(call matrix,oldest,$(PYTHON),"jax==0.10.2" "jaxlib==0.10.2")
	$(call matrix,middle,$(PYTHON312),"jax==0.11.2" "jaxlib==0.11.2")
	$(call matrix,newest,$(PYTHON312),"jax<0.13" "jaxlib<0.13")

# Every kernel for every architecture that the wheel may name; a warning, a spilled register or a stack frame is an error.
CUDA_ARCHS ?= 90a 100a 103a
CUDA_KERNELS := $(shell find ffi -name '*.cu')
NVCC_FLAGS := -std=c++17 -O3 -I. --fmad=false -prec-div=true -prec-sqrt=true -ftz=false -Werror all-warnings \
  -Xcompiler -Wall,-Wextra,-Werror
NVCC_RESOURCES = -Xptxas -Werror$(comma)-warn-spills$(comma)-warn-lmem-usage
comma := ,

cuda-archs: $(foreach a,$(CUDA_ARCHS),$(CUDA_KERNELS:%.cu=build/cuda-archs/$(a)/%.o))

define CUDA_ARCH
build/cuda-archs/$(1)/%.o: %.cu $(SOURCES)
	@mkdir -p $$(@D)
	nvcc $$(NVCC_FLAGS) $$(NVCC_RESOURCES) -gencode=arch=compute_$(1),code=sm_$(1) -c $$< -o $$@
endef
$(foreach a,$(CUDA_ARCHS),$(eval $(call CUDA_ARCH,$(a))))

clean:
	rm -rf $(VENV) .matrix build checkpoints/tiny
