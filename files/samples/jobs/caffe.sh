#!/bin/sh
# Train with Intel Caffe on several nodes: sh caffe.sh --solver SOLVER [--help]. A link to this file can stand where the
# guide's scripts/run_intelcaffe.sh was. The launcher is Python, because it parses prototxt and judges a log.
exec python3 "$(dirname "$(readlink -f "$0")")/caffe.py" "$@"
