#!/usr/bin/env bash
# A Ray cluster on SLURM nodes and one run on it:  sbatch launch/slurm.sh CONFIG [key=value..]
# Adapt: partition, account, nodes, GPUs and time below. The environment (.venv), models and data must
# be on storage shared by all nodes. The run is signalled 180 s before the end of the time and writes a
# checkpoint, as with `scancel --signal=TERM --batch JOB`; a plain `scancel JOB` kills it. Resume with
# `--resume RUN_DIR` (add `--restart-if-no-checkpoint` if it may have been killed before the first).
#SBATCH --job-name=raylearner
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --output=slurm-%j.txt
set -euo pipefail

root=${SLURM_SUBMIT_DIR:-$PWD}
venv=${RAYLEARNER_VENV:-$root/.venv}
port=${RAY_PORT:-6379}
cpus=${SLURM_CPUS_PER_TASK:-1}
gpus=${SLURM_GPUS_ON_NODE:-0}

# One token for the job's own cluster; srun passes the environment to all nodes.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$("$venv/bin/python" -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
ray=("$venv/bin/python" -m ray.scripts.scripts start --block --num-cpus="$cpus" --num-gpus="$gpus")

srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  "${ray[@]}" --head --node-ip-address="$address" --port="$port" --dashboard-host=127.0.0.1 &
others=$((${#nodes[@]} - 1))
if [ "$others" -gt 0 ]; then
  srun --nodes="$others" --ntasks="$others" --exclude="$head" --overlap \
    "${ray[@]}" --address="$address:$port" &
fi

# The driver runs in this shell, which SLURM starts on the head node, once all nodes have joined: an srun
# that is stopped kills its tasks.
export RAY_ADDRESS=$address:$port
"$venv/bin/python" launch/wait_for_nodes.py "${#nodes[@]}"
driver=
trap 'kill -TERM "$driver" 2>/dev/null || true' TERM
"$venv/bin/python" -m raylearner train "$@" &
driver=$!
status=0
wait "$driver" || status=$?
# `wait` returns at each signal: the run still writes its checkpoint.
while kill -0 "$driver" 2>/dev/null; do
  status=0
  wait "$driver" || status=$?
done
exit "$status"
