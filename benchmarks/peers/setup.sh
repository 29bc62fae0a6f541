#!/usr/bin/env bash
# Makes .cache/peers/<peer>/: a virtual environment with one peer in it, for benchmarks/peers/run.py.
#
#   benchmarks/peers/setup.sh lmcache|mooncake|nixl ...     PYTHON=python3.12 chooses the interpreter
#
# May be interrupted and run again: what is installed is found installed. Nothing of it is installed
# into .venv, because peers pin other versions of what objkv uses. Output of pip: .cache/peers/<peer>.log.
set -euo pipefail
cd "$(dirname "$0")/../.."

TORCH=2.13.0
LMCACHE=0.5.6
MOONCAKE=0.3.13.post1
NIXL=1.5.1
# What LMCache 0.5.6 imports on a machine without a GPU, of what it asks for: not cupy, CUDA, cuFile,
# nvtx, Bigtable. hiredis is left out as well: LMCache does not ask for it.
LMCACHE_NEEDS=(
  aiofile aiofiles blake3 aiohttp awscrt cryptography fastapi httpx 'huggingface_hub>=1.5.0' msgspec
  'numpy<=2.2.6' numba 'opentelemetry-api<=1.40.0' opentelemetry-sdk opentelemetry-exporter-otlp
  'opentelemetry-exporter-prometheus<=0.61b0' 'prometheus_client<=0.24.1' psutil py-cpuinfo pyyaml
  pyzmq 'grpcio>=1.78.0' 'protobuf<7' redis safetensors 'setuptools<81' sortedcontainers
  'transformers>=5.4' uvicorn httptools cachetools xxhash
)

usage() {
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

install() { # install PEER: into its environment, which $PIP is the pip of
  case $1 in
    lmcache)
      "${PIP[@]}" "torch==$TORCH"
      "${PIP[@]}" "${LMCACHE_NEEDS[@]}"
      "${PIP[@]}" --no-deps "lmcache==$LMCACHE"
      ;;
    mooncake)
      "${PIP[@]}" numpy xxhash "mooncake-transfer-engine-non-cuda==$MOONCAKE"
      ;;
    nixl)
      "${PIP[@]}" "torch==$TORCH" numpy xxhash
      "${PIP[@]}" --no-deps "nixl==$NIXL" "nixl-cu12==$NIXL"
      ;;
  esac
}

[ $# -gt 0 ] || usage
for peer in "$@"; do
  case $peer in lmcache | mooncake | nixl) ;; *) usage ;; esac
done
for peer in "$@"; do
  folder=.cache/peers/$peer
  log=.cache/peers/$peer.log
  mkdir -p .cache/peers
  printf '%s ... ' "$peer"
  [ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
  PIP=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
  if ! install "$peer" >"$log" 2>&1; then
    printf 'failed\n\nThe last lines of %s:\n' "$log" >&2
    tail -n 25 "$log" >&2
    exit 1
  fi
  echo done
done
