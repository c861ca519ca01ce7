#!/bin/sh
# One worker on this node, without a launcher: sh shell.sh [SCRIPT [OPTION …]]. What a script does without a cluster.
set -eu
. /etc/farandole/environment
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ $# -gt 0 ] || set -- /opt/farandole/samples/pytorch_mnist.py
exec python "$@"
