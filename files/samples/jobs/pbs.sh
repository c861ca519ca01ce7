#!/bin/sh
# Start a job with horovodrun from PBS's queue: qsub pbs.sh [SCRIPT [OPTION …]]. Output is written to horovod.o<number>.
#PBS -N horovod
#PBS -l select=2:ncpus=1:mpiprocs=1:ompthreads=1
#PBS -l walltime=00:30:00
#PBS -q normal
#PBS -j oe
set -e
cd "$PBS_O_WORKDIR"
module purge
module load farandole
hosts=$(sort "$PBS_NODEFILE" | uniq -c | awk '{ printf "%s%s:%d", separator, $2, $1; separator = "," }')
[ $# -gt 0 ] || set -- /opt/farandole/samples/pytorch_mnist.py
exec horovodrun "--${CONTROLLER:-gloo}" -np "$PBS_NP" -H "$hosts" python "$@"
