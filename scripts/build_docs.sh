#!/usr/bin/env bash
# Writes the generated pages and pictures, builds the site in strict mode into .cache/site, and checks
# every link of the built pages. Needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."

BIN=.venv/bin
SITE=.cache/site
LOG=.cache/site.log

mkdir -p .cache
for script in write_configuration write_cli write_api write_completion write_metrics write_models write_dashboard draw_pictures; do
  "$BIN/python" "scripts/$script.py"
done

# mkdocs keeps the pages of earlier builds.
rm -rf "$SITE"
# Without --quiet, because strict mode ignores the messages that it hides.
if ! NO_MKDOCS_2_WARNING=1 "$BIN/mkdocs" build --strict >"$LOG" 2>&1; then
  grep -v "^INFO" "$LOG" >&2
  exit 1
fi
"$BIN/python" scripts/check_site.py "$SITE"
echo "to read it: python3 -m http.server -d $SITE"
