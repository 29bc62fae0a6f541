#!/usr/bin/env bash
# Writes the generated pages and pictures, builds the site strictly into .cache/site, and follows
# every link in what was built. Needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."

BIN=.venv/bin
SITE=.cache/site
LOG=.cache/site.log

mkdir -p .cache
for script in write_configuration write_cli write_completion write_metrics write_dashboard draw_pictures; do
  "$BIN/python" "scripts/$script.py"
done

# mkdocs forgets no page of an earlier build.
rm -rf "$SITE"
# Not --quiet: what it hides, strict does not count.
if ! NO_MKDOCS_2_WARNING=1 "$BIN/mkdocs" build --strict >"$LOG" 2>&1; then
  grep -v "^INFO" "$LOG" >&2
  exit 1
fi
"$BIN/python" scripts/check_site.py "$SITE"
echo "read it: python3 -m http.server -d $SITE"
