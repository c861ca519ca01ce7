#!/bin/sh
# A job by mpirun: sh mpirun.sh [SCRIPT [OPTION …]]; NP=2 takes two workers instead of all slots.
set -eu
hostfile=${HOSTFILE:-/etc/farandole/hostfile}
np=${NP:-$(awk -F slots= '{ slots += $2 } END { print slots }' "$hostfile")}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ $# -gt 0 ] || set -- /opt/farandole/samples/pytorch_mnist.py
# Unbound, because a worker computes with more than the one core that it would be bound to.
exec mpirun -np "$np" --hostfile "$hostfile" --bind-to none -x OMP_NUM_THREADS python "$@"
