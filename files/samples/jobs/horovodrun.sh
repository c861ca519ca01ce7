#!/bin/sh
# A job by horovodrun: sh horovodrun.sh [SCRIPT [OPTION …]], in a folder that all nodes have.
# NP=2 takes two workers instead of all slots, CONTROLLER=mpi goes over MPI instead of Gloo.
set -eu
hostfile=${HOSTFILE:-/etc/farandole/hostfile}
np=${NP:-$(awk -F slots= '{ slots += $2 } END { print slots }' "$hostfile")}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ $# -gt 0 ] || set -- /opt/farandole/samples/pytorch_mnist.py
exec horovodrun "--${CONTROLLER:-gloo}" -np "$np" --hostfile "$hostfile" python "$@"
