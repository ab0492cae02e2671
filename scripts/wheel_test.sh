#!/usr/bin/env bash
# Installs a wheel into a new virtual environment and uses it outside the source tree, as a user would. The argument is the wheel,
# by default the one in dist/; PYTHON names the interpreter, by default that of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wheel=$(realpath "${1:-$(echo dist/disagg-*.whl)}")
python=${PYTHON:-$PWD/.venv/bin/python}
constraints=$PWD/constraints-dev.txt
examples=$PWD/examples
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

echo "wheel-test: installing ${wheel##*/} into a new environment with $("$python" -V)"
"$python" -m venv --without-pip "$folder/venv"
PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/pip --python "$folder/venv/bin/python" install -q --constraint "$constraints" "$wheel" >"$folder/pip.log" 2>&1 || {
  tail -n 40 "$folder/pip.log" >&2
  exit 1
}

cd "$folder"
PATH="$folder/venv/bin:$PATH"
unset PYTHONPATH
python - <<'PYTHON'
import importlib.metadata
import pathlib
import sys

import disagg
from disagg.core import _native
from disagg.state.align import group_concurrent_contiguous

assert pathlib.Path(disagg.__file__).is_relative_to(sys.prefix), disagg.__file__
assert pathlib.Path(_native.__file__).is_relative_to(sys.prefix), _native.__file__
assert [column.tolist() for column in group_concurrent_contiguous([4, 5, 9], [0, 1, 2])] == [[4, 9], [0, 2], [2, 1]]
assert pathlib.Path(disagg.__file__).with_name("py.typed").exists(), "py.typed"
assert pathlib.Path(_native.__file__).with_name("_native.pyi").exists(), "_native.pyi"
assert {"local", "mooncake", "nixl"} <= importlib.metadata.entry_points(group="disagg.backends").names, "entry points"
assert "torch" not in sys.modules, "torch was imported"
PYTHON
echo "wheel-test: running disagg-bench with the local backend"
disagg-bench --backend local --model llama-3-8b --tokens 256 --prefill tp=2 --decode tp=1,page=32
echo "wheel-test: running smallest_embed.py"
python "$examples/smallest_embed.py"
echo "wheel-test: running disagg explain and disagg doctor"
disagg explain --model llama-3-8b --tokens 256 --prefill tp=2 --decode tp=1 >explain.txt
grep -q "tp=2" explain.txt
disagg doctor >doctor.txt || true # the machine may lack an engine; the report must be complete
grep -q "cma" doctor.txt
