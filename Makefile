# `make train`, `make test` and `make verify` set up all they need in .venv: on Linux, with Python 3.11 or newer and a
# network.

PYTHON ?= python3
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
# Tensor-parallel ranks of `make train`: two on CPU; on GPUs two where their number is even (the rest is data parallel).
TP ?= $(if $(filter 0,$(GPUS)),2,$(if $(filter 1 3 5 7,$(GPUS)),1,2))
# Without a GPU torch's own index has a build that needs no CUDA libraries, which are gigabytes; uv knows that index, and
# where it does not answer the configured one serves. That build does not say which Triton belongs to it.
TORCH := $(if $(filter 0,$(GPUS)),torch==2.13.0 triton==3.7.1,torch>=2.11)
BIN := .venv/bin

# Tritons whose compilers `make compiled-matrix` tries; torch 2.11 to 2.15 bring them.
TRITONS := 3.6.0 3.7.1 3.9.0

# Processes that run the tests, each the whole of a file, in the order of tests/conftest.py. Few: most tests start ranks,
# which need the other cores. Many tests of the second tier wait for deadlines, so that a third process fills the cores.
PROCESSES = --numprocesses $(if $(filter test-all,$@),3,2) --dist loadfile --no-loadscope-reorder
# Tests start hundreds of processes, which need not compile the modules that another one has imported.
unexport PYTHONDONTWRITEBYTECODE
# What pyproject.toml's markers leave to `make test-all`.
FIRST_TIER := not (exhaustive or compile or processes or nodes or gpu)

# Folders of tests whose results depend on the instructions of the CPU and on the number of threads.
OF_PRODUCTS := $(addprefix tests/,layers ops models zero parallel drop_in checkpoint train commands)

.PHONY: help install train other-compilers check test test-all ci verify long offload compiled compiled-matrix docs lint types format clean
help:
	@echo "make train   install, then train a small GPT on two ranks (2 to 4 minutes on 2 CPU cores)"
	@echo "make check   install, then check four of the main parts in 15 seconds: between two edits"
	@echo "make test    install, then run the tests that find most faults (6 to 15 minutes on 2 CPU cores)"
	@echo "make test-all  install, then run every test (about an hour on 2 fast CPU cores)"
	@echo "make verify  install, then train two steps with each implementation of tensor parallelism, side by side"
	@echo "make long    install, then train a GPT at a context of 32768 tokens on one process and on four that share it"
	@echo "make offload install, then take a training step of GPT-2 1558M with its optimizer state on disk (19 GB)"
	@echo "make compiled         write benchmarks/results/compiled.md: registers, shared memory, instructions of all kernels"
	@echo "make compiled-matrix  compile all kernels under Triton $(TRITONS)"
	@echo "make ci      what must pass before a change lands: lint, types, check, docs, test"
	@echo "make docs    write build/docs: the pages of docs/ and the reference of the public modules, as HTML"
	@echo "make lint    ruff;  make types  mypy;  make format  ruff format;  make clean  remove .venv"

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tpfuse needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version`: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv .venv
	@echo "installing torch and what else tpfuse needs into .venv: $(if $(filter 0,$(GPUS)),about 520 MB,about 3 GB) to fetch, a minute or two"
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=24'
	@$(BIN)/python -m pip install --quiet uv 2>/dev/null || true
	@UV_HTTP_TIMEOUT=15 UV_HTTP_RETRIES=1 $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps \
		--torch-backend=$(if $(filter 0,$(GPUS)),cpu,auto) $(foreach package,$(TORCH),'$(package)') 2>/dev/null || \
	$(BIN)/python -m pip install --quiet --no-deps $(foreach package,$(TORCH),'$(package)')
	@PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet --editable '.[train,test,lint]'
	@touch $@
install: .venv/installed

train: install
	$(BIN)/tpfuse train --model.preset tiny --parallel.tp $(TP)

# The compilers beside the one at hand, whose front ends the tests try too.
other-compilers: install
	@here=`$(BIN)/python -c 'import triton; print(triton.__version__)'`; for version in $(TRITONS); do \
		[ $$version = $$here ] || $(MAKE) --no-print-directory build/triton-$$version || exit 1; \
	done

check: install
	$(BIN)/python -m tests.check

test: other-compilers
	$(BIN)/python -m pytest $(PROCESSES) -m "$(FIRST_TIER)"

# The second run has the instructions of the oldest CPUs, and more threads than most machines of tests have cores.
test-all: other-compilers
	$(BIN)/python -m pytest $(PROCESSES)
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=3 OMP_WAIT_POLICY=passive \
		$(BIN)/python -m pytest $(PROCESSES) -m "$(FIRST_TIER)" $(OF_PRODUCTS)

# What must pass before a change lands; .ci/run and .github/workflows/ci.yml run it. The compilers that the tests need
# are fetched while mypy runs.
TESTS := test
ci:
	$(MAKE) lint
	$(MAKE) --jobs=2 types other-compilers
	$(MAKE) check docs $(TESTS)

verify: install
	$(BIN)/tpfuse verify --operators training

long: install
	$(BIN)/python -m benchmarks.long_context

offload: install
	mkdir -p build
	$(BIN)/python -m benchmarks.offload_step --folder build

compiled: install
	mkdir -p build
	$(BIN)/python -m tpfuse.tools.compilation --markdown > build/compiled.md
	mv build/compiled.md benchmarks/results/compiled.md

build/triton-%: | install
	rm -rf $@.part
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part triton==$*
	mv $@.part $@
compiled-matrix: $(addprefix build/triton-,$(TRITONS))
	for version in $(TRITONS); do \
		echo "Triton $$version"; \
		PYTHONPATH=build/triton-$$version $(BIN)/python -m pytest tests/tools/test_compilation.py tests/kernels/test_signal_ptx.py || exit 1; \
	done

.venv/docs-installed: .venv/installed
	@PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@
docs: .venv/docs-installed
	rm -rf build/docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/docs
	@echo "build/docs/index.html"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	rm -rf build/types build/lib
	$(BIN)/python -m pip install --quiet --no-deps --target build/types .
	MYPYPATH=build/types $(BIN)/mypy -p tpfuse

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info
