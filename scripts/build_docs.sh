#!/usr/bin/env bash
# Writes the generated pages (in CI it leaves them to `make check`, which finds stale ones), and builds
# the site into .cache/site in strict mode, which checks its links. Needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."

SITE=.cache/site
LOG=.cache/site.log

mkdir -p .cache
[ "${CI:-}" = true ] || .venv/bin/python -m scripts.pages
# Without --quiet, because strict mode ignores the messages that it hides.
if ! NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict >"$LOG" 2>&1; then
  grep -v "^INFO" "$LOG" >&2
  exit 1
fi
echo "to read it: python3 -m http.server -d $SITE"
