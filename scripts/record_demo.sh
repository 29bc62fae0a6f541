#!/usr/bin/env bash
# Records `objkv demo` as docs/images/demo.svg. On a machine with nothing else to do: the picture
# shows how long everything took.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python scripts/record_terminal.py --out docs/images/demo.svg --size 112x29 --seconds 900 \
  --idle 1.2 --apart 0.3 --least 3 --crop 'Inspect the demo' \
  --title 'objkv demo: one replica answers with KV that another computed' -- .venv/bin/objkv demo
