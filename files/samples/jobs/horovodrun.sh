#!/bin/sh
# Start a job with horovodrun: sh horovodrun.sh [SCRIPT [OPTION …]], in a folder that exists on all nodes.
# NP=2 uses two workers instead of all slots, CONTROLLER=mpi uses MPI instead of Gloo.
set -eu
hostfile=${HOSTFILE:-/etc/farandole/hostfile}
np=${NP:-$(awk -F slots= '{ slots += $2 } END { print slots }' "$hostfile")}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ $# -gt 0 ] || set -- /opt/farandole/samples/pytorch_mnist.py
exec horovodrun "--${CONTROLLER:-gloo}" -np "$np" --hostfile "$hostfile" python "$@"
