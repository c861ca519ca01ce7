#!/bin/sh
# Train with Intel Caffe on several nodes: sh caffe.sh --solver SOLVER [--help]. A link to this file can stand where the
# guide's scripts/run_intelcaffe.sh was.
exec /usr/local/libexec/farandole/caffe "$@"
