# All commands for development; `make help` lists them.
VENV := .venv
PYTHON ?= python3
LAB ?= lab
NODES ?= 2
# The lab's name where it has to be said.
OTHER := $(filter-out lab,$(LAB))
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
# Each of thousands of processes would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-down test test-all test-kernels test-horovod bench-stack bench-site bench-peers bench-predict bench-train lint unit check docs tables explain-score requirements horovod-sdist

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/ready ## create the Python environment in .venv

$(VENV)/ready: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Farandole needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  [ "$$(id -u)" = 0 ] && apt-get update --quiet && apt-get install --yes --no-install-recommends python3-venv \
	  || { echo "Python has no ensurepip: run  sudo apt-get install python3-venv" >&2; exit 1; }; }
	$(PYTHON) -m venv $(VENV)
	pip install --quiet $(if $(wildcard bundle/python),--no-index --find-links bundle/python) --require-hashes --requirement requirements.txt
	pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup ## set up and validate two hosts on this machine
	@set -e; begun=$$(date +%s); \
	phase() { echo "$$*"; since=$$(date +%s); "$$@"; took="$${took-}$$(printf '%5d  %s' $$(($$(date +%s) - since)) "$$*")\n"; }; \
	phase farandole lab setup; \
	phase farandole lab up --name $(LAB) --nodes $(NODES); \
	phase farandole apply -i inventory/$(LAB); \
	phase farandole validate -i inventory/$(LAB); \
	printf '\nSeconds:\n%b%5d  in all\n' "$$took" $$(($$(date +%s) - begun))
	@echo
	@echo "The lab is up: \`.venv/bin/farandole lab status\` shows it, \`make demo-down$(if $(OTHER), LAB=$(OTHER))\` removes it and its report."
	@echo "Get in:        .venv/bin/farandole lab ssh $(if $(OTHER),--name $(OTHER) )node-1"
	@echo "Run a job:     .venv/bin/farandole lab ssh $(if $(OTHER),--name $(OTHER) )node-1 -- runuser -u trainer -- horovodrun -np 2 -H node-1:1,node-2:1 python /opt/farandole/samples/pytorch_mnist.py"

demo-down: setup ## remove the demo's lab and restore this machine
	farandole lab down --name $(LAB)

test: setup ## run lint, unit tests, Molecule scenarios, and the core of the tests on hosts in containers and with kernels of their own (an hour)
	farandole lab setup --kernel own
	python tests/browser.py
	python tests/run.py

lint: setup ## run ansible-lint, yamllint, ruff and mypy
	ANSIBLE_INVENTORY=inventory/example ansible-lint --strict -q
	yamllint --strict .
	ruff check --quiet .
	ruff format --quiet --check .
	mypy

unit: setup ## run the unit tests only
	pytest --quiet --numprocesses auto --dist worksteal tests/unit

check: setup ## lint, test and twice apply one role on a lab that is kept: make check ROLE=base [WITH='slurm_enabled=true']
	python tests/check.py "$(ROLE)" "$(WITH)"

test-%: setup ## run every test of a lab or scenario by its name, also those for which `make test` has no time: make test-slurm
	farandole lab setup
	FARANDOLE_EVERY=1 python tests/run.py " $*"

test-all: setup ## run every test for which hosts in containers are enough (hours)
	farandole lab setup
	FARANDOLE_EVERY=1 python tests/run.py

test-kernels: setup ## what containers cannot show, on hosts with kernels of their own (three hours, with nothing else on the machine)
	farandole lab setup --kernel own
	farandole lab setup --kernel stock
	@failed=; for lab in kernels waves many_kernels administrator delay rdma; do \
	  FARANDOLE_EVERY=1 python tests/run.py "lab $$lab" || failed="$$failed $$lab"; done; \
	if [ "$$failed" ]; then echo "Failed:$$failed" >&2; exit 1; fi

test-horovod: setup ## run Horovod's own tests and ours of Keras 3 on two nodes: make test-horovod TESTS=horovod/test
	@test -n "$(TESTS)" || { echo "TESTS has to be the folder test of Horovod's sources: https://github.com/horovod/horovod" >&2; exit 2; }
	farandole lab setup
	PYTHONPATH=tests:tests/lab python tests/upstream/run.py "$(TESTS)" $(ONLY)

bench-stack: setup ## measure the stack's time and disk space: cold, warm, with added nodes (an hour)
	farandole lab setup
	python tests/bench/stack.py

bench-site: setup ## measure site.yml on 2 to 64 nodes: bare, nothing to do, one node differs (an hour)
	farandole lab setup
	python tests/bench/site.py

bench-peers: setup ## measure what the head sends, and how long nodes fetch, when 2 to 64 nodes pass an archive on or not (half an hour)
	farandole lab setup
	python tests/bench/peers.py

bench-predict: setup ## compare farandole predict with jobs on two to four nodes (half an hour)
	farandole lab setup
	python tests/bench/predict.py

bench-train: setup ## compare sums and training on two nodes with the network, torch.distributed and one node (half an hour)
	farandole lab setup
	python tests/bench/train.py

explain-score: setup ## count how many stored logs farandole explain explains rightly
	python tests/explain.py

horovod-sdist: setup ## write Horovod's source with all patches into dist/, with a version of its own, for pip elsewhere
	python tests/sdist.py dist

docs: setup ## build the site of all pages in .farandole/site, with a search that needs no server
	sphinx-build --fresh-env -q -W --keep-going -c docs . .farandole/site
	@echo "open .farandole/site/docs/index.html"

tables: setup ## regenerate the tables of variables
	python tests/tables.py

requirements: setup ## regenerate requirements.txt from pyproject.toml
	uv pip compile --quiet --extra dev --generate-hashes --no-header --no-annotate --output-file requirements.txt pyproject.toml
	python tests/requirements.py
