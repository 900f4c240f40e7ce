# The verbs for people and CI. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
# Set this to a CPU-only package index to install torch from there (the default index brings the CUDA build).
TORCH_INDEX_URL ?=
BIN := .venv/bin
STAMP := .venv/.installed

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup demo recording test test-all check style soak coverage mutants chaos bench images cluster cluster-down cluster-packages cluster-ready full-ready proto crd lock clean

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP) ## build .venv from the locked constraints (two minutes once, then seconds in every tree)

# The packages are kept in ~/.cache/modelswarm and shared by all trees; pip itself prints nothing meanwhile.
$(STAMP): constraints.txt pyproject.toml tools/ci/make_venv.py
	@command -v $(PYTHON) >/dev/null || { echo "ModelSwarm needs Python 3.11 or newer, and $(PYTHON) is not found:" \
	  "apt-get install python3-venv (Debian, Ubuntu), or set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "ModelSwarm needs Python 3.11 or newer, and $(PYTHON) is %d.%d: set PYTHON=/path/to/python3" % sys.version_info[:2])'
	@TORCH_INDEX_URL="$(TORCH_INDEX_URL)" $(PYTHON) tools/ci/make_venv.py

demo: $(STAMP) ## four servers, one gateway, one chat, one kill: under a minute
	@echo "make demo: starts four servers and a gateway, asks a question, kills a server in the middle (under a minute)"
	@$(BIN)/python -m modelswarm.cli demo

check: style ## format, lint, import rules, house rules, types (seconds; two minutes without mypy's cache)
	@$(BIN)/python tools/ci/check_types.py

style: $(STAMP) ## the same without types: seconds
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python tools/ci/check_house.py

# The tiers of the tests: tools/ci/run_tests.py defines them and leaves logs and durations in build/tests.
# PYTEST holds further options of pytest.
RUN_TESTS := @$(BIN)/python tools/ci/run_tests.py

plan-%: $(STAMP)
	$(RUN_TESTS) $* --plan

test: plan-fast style cluster-ready ## the fast tier, as CI runs it: 9 to 14 minutes with the cluster's programs cached
	$(RUN_TESTS) fast $(PYTEST)

test-all: plan-full style full-ready ## every test but those of the soak: about an hour
	$(RUN_TESTS) full $(PYTEST)

soak: plan-soak style cluster-ready ## hours: long outages, thousands of seeds, large clusters
	$(RUN_TESTS) soak $(PYTEST)

coverage: plan-$(or $(TIER),fast) $(if $(filter full,$(TIER)),full-ready,cluster-ready) ## lines of the product that `make test` runs, or TIER=full (twice as long)
	$(BIN)/python -m tools.ci.coverage_report $(or $(TIER),fast)

mutants: $(STAMP) ## change the product by one line, 60 times, and count what the tests catch (an hour; COUNT, SEED, TIER=full)
	$(BIN)/python tools/ci/mutate.py --count $(or $(COUNT),60) --seed $(or $(SEED),1) --tier $(or $(TIER),fast)

bench: $(STAMP) ## all benchmarks, or one: make bench ONLY=two_spans_1
	PYTHONPATH=tests $(BIN)/python -m bench $(ONLY)

# STREAMS, NEW (tokens of an answer), SPANS, REPLICAS, GATEWAYS and EVERY (seconds between two faults) change the swarm and its
# load, FAULTS="kill one-way" and EACH=1 (each of them comes before any comes again) change the faults.
chaos: $(STAMP) ## disturb a real local swarm and judge its answers: make chaos SECONDS=60 SEED=7 (MODEL=hash, torch)
	@PYTHONPATH=tests $(BIN)/python -m chaos $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) \
	  $(if $(MODEL),--model $(MODEL)) $(if $(STREAMS),--streams $(STREAMS)) $(if $(NEW),--new $(NEW)) \
	  $(if $(SPANS),--spans $(SPANS)) $(if $(REPLICAS),--replicas $(REPLICAS)) $(if $(GATEWAYS),--gateways $(GATEWAYS)) \
	  $(if $(EVERY),--every $(EVERY)) $(if $(EACH),--each) $(if $(FAULTS),--faults $(FAULTS))

# REGISTRY, IMAGE_TAG, IMAGE_BASE and BUILDER choose names, base image and builder; IMAGES="operator server-slim" some.
images: ## build the container images with docker, podman or buildah (5 minutes once, then one)
	@TORCH_INDEX_URL="$(TORCH_INDEX_URL)" $(PYTHON) tools/make_images.py $(IMAGES) \
	  --builder "$(BUILDER)" --registry "$(or $(REGISTRY),localhost)" --tag "$(IMAGE_TAG)" --base "$(IMAGE_BASE)"

cluster: $(STAMP) ## a real Kubernetes on this machine (15 to 45 minutes once, then half a minute; NODES=2 GPUS=4)
	@$(BIN)/python -m tools.devcluster up --nodes $(or $(NODES),2) --gpus $(or $(GPUS),4)

cluster-down: $(STAMP) ## remove it: nothing is left
	@$(BIN)/python -m tools.devcluster down

cluster-packages: $(STAMP) ## install the Debian packages that the cluster and its tests need (as root)
	@$(BIN)/python -m tools.devcluster packages

cluster-ready: $(STAMP) ## build for the cluster tests: packages, programs, images (15 to 45 minutes once, then seconds)
	@$(BIN)/python -m tools.devcluster prepare

full-ready: $(STAMP) ## as cluster-ready, and Chromium for the tests that open a page
	@$(BIN)/python -m tools.devcluster prepare --browser

recording: $(STAMP) ## record docs/pictures/session.cast and draw docs/pictures/session.svg (a minute; needs ports 8000 to 8003, or root)
	@$(BIN)/python -m tools.recording.record_session

proto: $(STAMP) ## regenerate the protobuf modules
	$(BIN)/python tools/make_proto.py

crd: $(STAMP) ## regenerate the CRD, the chart's copy and the reference in docs/
	$(BIN)/python tools/make_crd.py
	$(BIN)/python tools/make_crd.py --docs

lock: $(STAMP) ## write constraints.txt and images/requirements from what is installed
	$(BIN)/pip freeze --exclude-editable > constraints.txt
	$(BIN)/python tools/make_requirements.py

clean: ## remove .venv and build (results and logs of tests)
	rm -rf .venv .venv.new .venv.old build
