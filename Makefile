# Two commands matter: `make demo` and `make test`. Both set everything up by themselves.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup build demo test schedules torture check docs bench validate gpu clean

help: ## show the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "moesim needs Python 3.11 or newer: make PYTHON=python3.11 …"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup: build ## create .venv with pinned versions

build: $(STAMP) ## compile what was edited
	@$(BIN)/python setup.py -q build_ext --inplace

demo: build ## measure this PC, record routing, run it for real and simulated, compare policies on a packaged PC and on this one
	mkdir -p out/demo
	$(BIN)/moesim profile out/demo/hw.toml --quick
	$(BIN)/moesim record out/demo/trace.parquet --prompts README.md --limit 4 --new-tokens 64 --temperature 1
	$(BIN)/moesim validate out/demo/trace.parquet --hw out/demo/hw.toml --policy all-cpu+none,on-demand+lru,greedy+lru \
		--cache-ratio 0.25 --batch 1 --shape olmoe-1b-7b/4 --steps 12 --repetitions 2
	$(BIN)/moesim compare gpt-oss-20b-like --hw rtx4060ti --gpu-memory 8GiB --html out/demo/packaged.html --perfetto out/demo/packaged.json
	$(BIN)/moesim compare gpt-oss-20b-like --hw out/demo/hw.toml --cache-ratio 0.25 --html out/demo/own.html

test: build ## all tests (CPU only; gpu tests add themselves where CUDA is there)
	$(BIN)/python -m pytest -n 2 --dist loadfile

schedules: $(STAMP) ## further schedules of the adversarial device, ten minutes at most, from where it ended last (SECONDS=60 for each claim)
	$(BIN)/python -m pytest tests/runtime/test_adversarial_device.py --schedules 2000 \
		--schedule-seconds $(or $(SECONDS),55) --schedules-done out/schedules.json

torture: $(STAMP) ## attack everything that is read and written, long and drawn anew (ATTACKS=500 of each kind)
	ATTACKS=$(or $(ATTACKS),200) $(BIN)/python -m pytest tests/torture

docs: $(STAMP) ## the documentation site, into out/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

check: build docs ## style, types, import diagram, documentation site
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/project/test_architecture.py

bench: build ## print speed and memory figures as ratios
	$(BIN)/python -m benchmarks

validate: build ## calibrate this PC, run a small grid for real, compare with the simulation
	mkdir -p out/validate
	$(BIN)/python -m moesim calibrate out/validate/hw.toml --quick
	$(BIN)/python -m moesim validate traces/data/tiny_evaluation.parquet --hw out/validate/hw.toml \
		--policy all-cpu+none,on-demand+lru,fixed-mapping+lru,greedy+lru --cache-ratio 0.15,0.5 --batch 1,4 \
		--shape olmoe-1b-7b/2,qwen3-30b-a3b/4 --steps 8 --repetitions 3 --out out/validate

gpu: build ## eight minutes on a CUDA card: checks, profile, recording, real runs, a verdict; goes on where it stopped (REHEARSE=1 on the host)
	$(BIN)/python -m benchmarks.gpu --out out/gpu$(if $(REHEARSE),-rehearsal --rehearse); held=$$?; \
	$(if $(REHEARSE),,test ! -f out/gpu/gpu.md || cp out/gpu/gpu.md docs/measurements/gpu.md;) exit $$held

clean: ## remove what the targets made
	rm -rf .venv out build dist *.egg-info
