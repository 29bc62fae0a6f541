#!/usr/bin/env bash
# Writes scripts/image-requirements.txt: the exact versions and hashes of what the command line's image
# contains, for every platform and Python that objkv supports. Run it to take newer versions.
set -euo pipefail
cd "$(dirname "$0")/.."

UV=uv==0.13.9
VENV=.cache/uv
FILE=scripts/image-requirements.txt

[ -x "$VENV/bin/uv" ] || "${PYTHON:-python3}" -m venv "$VENV"
"$VENV/bin/pip" install --quiet --disable-pip-version-check "$UV"
{
  echo "# Written by scripts/write_image_requirements.sh for the Dockerfile."
  # One package a line.
  "$VENV/bin/uv" pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
    --no-header --no-annotate --extra encryption --extra otel pyproject.toml |
    sed -e ':join' -e '/\\$/{N' -e 's/ *\\\n */ /' -e 'bjoin' -e '}'
} >"$FILE.new"
mv "$FILE.new" "$FILE"
echo "wrote $FILE: $(grep -c == "$FILE") packages"
