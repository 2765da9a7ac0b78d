#!/usr/bin/env bash
#SBATCH --job-name=big
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --partition=a100
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=big-%j.log
#SBATCH --signal=B:USR1@300
set -uo pipefail

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))  # and the one after it

# Each task is one process of the run; a task that ends leaves the others a minute to end by themselves.
srun --wait=60 bash -c \
  'exec "$@" "device.processes=$SLURM_NTASKS" "device.process=$SLURM_PROCID"' launch \
  python -m tlt_jax.main run.name=big 'run.output_dir=/shared/my runs' 'stages=[pretrain, align]' "device.coordinator=$host:$port" &
step=$!
trap 'kill -TERM "$step"' USR1
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # a signal ends `wait` before the step

case "$code" in 143 | 3) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit "$code"
