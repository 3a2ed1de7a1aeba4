#!/usr/bin/env bash
# Submits a run as a Ray job and returns; `--follow` shows its log until it ends.
#   bash launch/submit.sh CONFIG [OVERLAY..] [key=value..] [--follow]
#   bash launch/submit.sh --resume RUN_DIR [--restart-if-no-checkpoint]
#   bash launch/submit.sh --sweep configs/sweeps/FILE.yaml
# RAY_API_SERVER_ADDRESS, or --address, names the cluster's dashboard, http://HOST:8265; without it,
# that of this machine. The job gets this repository, without files in .gitignore and .rayignore.
# `--pip requirements.txt` lets the cluster install missing packages, `--env NAME` passes a variable of
# this shell to the job. Details: docs/jobs.md.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Paths are relative to the current directory, but the job resolves them in the repository.
arguments=()
for argument in "$@"; do
  if [ -e "$argument" ] && [ "${argument#/}" = "$argument" ]; then
    argument=$(cd "$(dirname -- "$argument")" && pwd)/$(basename -- "$argument")
    argument=${argument#"$root/"}
  fi
  arguments+=("$argument")
done
cd "$root"
bash launch/setup.sh
venv=${RAYLEARNER_VENV:-.venv}
case $venv in
  /*) ;;
  *) venv=$root/$venv ;;
esac
exec "$venv/bin/python" -m raylearner submit ${arguments[@]+"${arguments[@]}"}
