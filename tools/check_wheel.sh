#!/usr/bin/env bash
# Builds the wheel (from the source archive, so both are checked) and imports it where nothing else is installed.
# Usage: tools/check_wheel.sh PYTHON, a Python that has the `build` package.
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$(dirname "$0")/.."
constraints=$PWD/constraints.txt
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

"$python" -m build --outdir "$tmp/dist" . >"$tmp/log" 2>&1 || { cat "$tmp/log"; exit 1; }
wheel=$(echo "$tmp"/dist/*.whl)

cd "$tmp" # the checkout must not be importable
"$python" -m venv fresh
fresh/bin/python -m pip install -qq --no-compile -c "$constraints" "$wheel" # compiling all of torch takes half a minute
fresh/bin/python -W error - "$wheel" <<'PYTHON'
import importlib.metadata
import sys
import zipfile
from pathlib import Path

import shardfn

assert Path(shardfn.__file__).is_relative_to(sys.prefix), shardfn.__file__
names = zipfile.ZipFile(sys.argv[1]).namelist()
assert "shardfn/py.typed" in names, "py.typed is missing from the wheel"
strays = [name for name in names if not name.startswith(("shardfn/", "shardfn-"))]
assert not strays, f"the wheel holds files outside the package: {strays}"
print(f"shardfn {importlib.metadata.version('shardfn')} installs and imports from {len(names)} packed files")
PYTHON
