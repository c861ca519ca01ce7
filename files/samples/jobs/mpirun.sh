#!/bin/sh
# Start a job with mpirun: sh mpirun.sh [SCRIPT [OPTION …]]; NP=2 uses two workers instead of all slots.
set -eu
hostfile=${HOSTFILE:-/etc/farandole/hostfile}
np=${NP:-$(awk -F slots= '{ slots += $2 } END { print slots }' "$hostfile")}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ $# -gt 0 ] || set -- /opt/farandole/samples/pytorch_mnist.py
# Not bound, because a worker uses more than the one core that it would be bound to.
exec mpirun -np "$np" --hostfile "$hostfile" --bind-to none -x OMP_NUM_THREADS python "$@"
