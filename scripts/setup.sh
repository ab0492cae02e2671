#!/usr/bin/env bash
# Makes `.venv` ready for development: packages at the versions of constraints-dev.txt, and this project, editable, with its
# extension module built. Does only what its inputs have changed since the last time. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PATH:/usr/sbin:/sbin" # ldconfig, for those who are not root

readonly venv=.venv
readonly python="$venv/bin/python"
readonly log="$venv/setup.log"
readonly extras=dev,docs,cli,nixl,mooncake-cpu,plot,examples
readonly build_requirements=(scikit-build-core nanobind cmake ninja)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf 'setup: %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# Runs a command with its output in the log, which is shown if it fails.
quietly() {
  if ! "$@" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    fail "failed: $*"
  fi
}

can_apt() { [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; }

# Installs Debian packages; tries what is already known before it asks for new lists.
apt_install() {
  local output
  output=$(mktemp)
  local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@")
  say "installing system packages: $*"
  if ! "${install[@]}" >"$output" 2>&1 && ! { apt-get update -qq && "${install[@]}"; } >"$output" 2>&1; then
    tail -n 20 "$output" >&2
    rm -f "$output"
    fail "apt-get could not install: $*"
  fi
  rm -f "$output"
}

# `need CONDITION SENTENCE PACKAGE...`: where the condition fails, installs the packages and asks again, or says the sentence.
need() {
  local condition=$1 sentence=$2
  shift 2
  "$condition" && return
  if can_apt; then
    apt_install "$@"
    "$condition" && return
  fi
  fail "$sentence (Debian: apt-get install $*)"
}

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if recent "$name"; then
      base=$name
      return
    fi
  done
  return 1
}

# A virtual environment names its own place in its scripts: one that was moved or copied is of no use.
is_usable() { [[ -x $python ]] && recent "$python" && grep -qsF "$PWD/$venv" "$venv/bin/activate"; }

has_venv() { "$base" -c 'import ensurepip, venv' >/dev/null 2>&1; }

has_headers() { [[ -f $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]]; }

has_compiler() {
  echo '#include <span>
#include <thread>
std::jthread thread;' | "${CXX:-c++}" -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1
}

# What Mooncake's wheel links to and does not bring. Without it everything else works.
mooncake_libraries() {
  local cached missing=()
  cached=$(ldconfig -p)
  grep -q 'libibverbs\.so\.1 ' <<<"$cached" || missing+=(libibverbs1)
  grep -q 'libmlx5\.so\.1 ' <<<"$cached" || missing+=(ibverbs-providers)
  grep -q 'libnuma\.so\.1 ' <<<"$cached" || missing+=(libnuma1)
  grep -q 'libcurl\.so\.4 ' <<<"$cached" || missing+=(libcurl4)
  ((${#missing[@]})) || return 0
  if can_apt; then
    apt_install "${missing[@]}"
  else
    say "Mooncake cannot be used before these system packages are installed: ${missing[*]} (as root: apt-get install ${missing[*]})"
  fi
}

fingerprint() { { "$python" -VV && sha256sum "$@"; } | sha256sum; }

# Whether the step of that name was last done with this fingerprint.
is_done() { [[ -f $venv/$1.stamp && $(<"$venv/$1.stamp") == "$2" ]]; }

if [[ -n ${PYTHON:-} ]]; then
  find_python || fail "PYTHON=$PYTHON: expected Python 3.11 or newer, found $({ "$PYTHON" -V || echo none; } 2>/dev/null)"
else
  need find_python "Python 3.11 or newer is needed; PYTHON=... names one" python3
fi
if ! is_usable; then
  need has_venv "$base cannot make virtual environments" python3-venv
  say "creating $venv with $("$base" -V)"
  rm -rf "$venv"
  "$base" -m venv "$venv"
fi

mooncake_libraries

mapfile -t sources < <(find CMakeLists.txt csrc -type f \( -name CMakeLists.txt -o -name '*.hpp' -o -name '*.cpp' \) | LC_ALL=C sort)
packages=$(fingerprint pyproject.toml constraints-dev.txt scripts/setup.sh)
extension=$(fingerprint pyproject.toml constraints-dev.txt scripts/setup.sh "${sources[@]}")
if is_done packages "$packages" && is_done extension "$extension"; then
  say "$venv is up to date"
  exit
fi

need has_compiler "a C++20 compiler is needed; CXX=... names one" g++
need has_headers "the headers of $("$python" -V) are needed" python3-dev

pip=("$python" -m pip install -q --constraint constraints-dev.txt)
export SKBUILD_CMAKE_DEFINE="DISAGG_STRICT=ON"
if is_done packages "$packages"; then
  say "building the extension module"
  quietly "${pip[@]}" --no-build-isolation --no-deps --editable .
else
  say "installing build tools"
  quietly "${pip[@]}" "${build_requirements[@]}"
  say "installing packages, and building the extension module (minutes, the first time)"
  quietly "${pip[@]}" --no-build-isolation --editable ".[$extras]"
fi
"$python" -c 'import disagg.core._native' || fail "the extension module cannot be imported"
echo "$packages" >"$venv/packages.stamp"
echo "$extension" >"$venv/extension.stamp"
say "$venv is ready"
