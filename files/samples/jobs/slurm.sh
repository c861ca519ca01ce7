#!/bin/sh
# Train in the queue: sbatch slurm.sh [SCRIPT [OPTION …]], in a folder that exists on all nodes.
# Options of sbatch change the sizes: sbatch --nodes=4 slurm.sh. LAUNCHER=mpirun or srun starts the workers otherwise.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=1:00:00
set -eu
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
# The samples fail if they are fewer, as when each worker trains alone.
export FARANDOLE_RANKS="$SLURM_NTASKS"
[ $# -gt 0 ] || set -- /opt/farandole/samples/pytorch_mnist.py
case "${LAUNCHER:-horovodrun}" in
horovodrun) exec horovodrun "--${CONTROLLER:-gloo}" python "$@" ;;
mpirun) exec mpirun --bind-to none -x OMP_NUM_THREADS -x FARANDOLE_RANKS python "$@" ;;
srun) exec srun --mpi="${PMI:-pmix}" python "$@" ;;
*) echo "slurm.sh: LAUNCHER=$LAUNCHER is none of horovodrun, mpirun, srun" >&2; exit 1 ;;
esac
