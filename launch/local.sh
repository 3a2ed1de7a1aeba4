#!/usr/bin/env bash
# Sets up this machine if needed, starts a local Ray cluster and runs a configuration to its end:
#   bash launch/local.sh CONFIG [OVERLAY..] [key=value..]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/launch/setup.sh"
venv=${RAYLEARNER_VENV:-.venv}
case $venv in
  /*) ;;
  *) venv=$root/$venv ;;
esac
exec "$venv/bin/python" -m raylearner train "$@"
