# Builds the wheel and the sdist, and installs the wheel alone. release.sh and release_check.sh source
# this file after they have set NAME, WORK, PYTHON and DIST.

LOG=$WORK/pip.log
BUILD=$WORK/build-venv
CLEAN=$WORK/venv
unset PYTHONPATH

say() { printf '%s: %s\n' "$NAME" "$*"; }

fail() {
  say "$*" >&2
  exit 1
}

logged() { # logged COMMAND...: output to the log; stop with the log's tail if it fails
  "$@" >>"$LOG" 2>&1 || { tail -n 25 "$LOG" >&2; exit 1; }
}

pip_install() { # pip_install VENV ARGUMENTS...
  local venv=$1
  shift
  logged "$venv/bin/pip" install --no-compile "$@"
}

build() { # build OPTION FOLDER SOURCE
  logged "$BUILD/bin/python" -m build --no-isolation "$1" --outdir "$2" "$3"
}

build_all() { # the wheel from the tree, the sdist, and the wheel that the sdist makes
  rm -rf "$WORK"
  mkdir -p "$WORK" "$DIST"
  : >"$LOG"
  "$PYTHON" -m venv --clear "$BUILD"
  pip_install "$BUILD" build twine "$("$PYTHON" -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')"
  build --wheel "$DIST" .
  build --sdist "$DIST" .
  mkdir "$WORK/unpacked"
  tar --extract --file "$DIST"/objkv-*.tar.gz --directory "$WORK/unpacked" --strip-components 1
  build --wheel "$WORK/rebuilt" "$WORK/unpacked"
  build --sdist "$WORK/rebuilt" .
  cmp "$DIST"/objkv-*.tar.gz "$WORK"/rebuilt/*.tar.gz || fail "two builds of the sdist differ"
  logged "$BUILD/bin/python" -m twine check --strict "$DIST"/*
  "$BUILD/bin/python" scripts/check_wheel.py "$DIST"/*.whl "$DIST"/*.tar.gz "$WORK"/rebuilt/*.whl
}

install_wheel() { # in an environment that has nothing but the wheel and what it requires
  "$PYTHON" -m venv "$CLEAN"
  pip_install "$CLEAN" "$DIST"/*.whl
  "$CLEAN/bin/pip" check >>"$LOG" 2>&1 || fail "pip check: $(tail -n 3 "$LOG")"
}
