# make demo      train a GPT on 2 ranks, compare it with the unsharded model
# make test      run the tests
# make test-gpu  run on all GPUs there are, or on an emulated one, and write a report to send
# make check     lint, formatting, types
# make docs      the pages of docs/ and the reference as HTML, in build/docs
# make clean     remove the environment and what demo and docs wrote
PYTHON ?= python3
VENV ?= .venv
DEMO ?= build/demo
REPORT ?= build/gpu-report.md
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-gpu check docs clean

$(VENV)/.made:
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(PACKAGE): pyproject.toml constraints.txt | $(VENV)/.made
	@echo "installing fsdp_compile and PyTorch into $(VENV): a minute or more"
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(INSTALLED): $(PACKAGE)
	@echo "installing what tests and docs need"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,examples,docs]'
	touch $@

# Killed and started again, the training goes on from its last checkpoint in $(DEMO)/checkpoint.
demo: $(PACKAGE)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/train_gpt.py \
	    --checkpoint $(DEMO)/checkpoint --out $(DEMO)/graphs --losses $(DEMO)/losses.jsonl --time-limit 300
	@echo; echo "the unsharded model, in eager on one process, for the same 20 losses:"
	$(BIN)/python examples/train_gpt.py --reference --steps 20 --compare $(DEMO)/losses.jsonl
	@echo; echo "$(DEMO)/graphs/report.html is for a browser; schedule.txt begins:"; head -n 24 $(DEMO)/graphs/schedule.txt

# Two files at a time, those that take longest first.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# In ten minutes; half an hour where a GPU is emulated, at most.
test-gpu: $(INSTALLED)
	$(BIN)/python -m tests.gpu --out $(REPORT)

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs

clean:
	rm -rf $(VENV) $(DEMO) build/docs
