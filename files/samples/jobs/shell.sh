#!/bin/sh
# Run one worker on this node, without a launcher or a cluster: sh shell.sh [SCRIPT [OPTION …]].
set -eu
. /etc/farandole/environment
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ $# -gt 0 ] || set -- /opt/farandole/samples/pytorch_mnist.py
exec python "$@"
