#!/usr/bin/env bash
# Prepares `.venv` for development: installs packages at the versions of constraints-dev.txt and this project in editable
# mode, and builds the extension module. Repeats only the steps whose inputs have changed. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PATH:/usr/sbin:/sbin" # for ldconfig, which other users than root lack in PATH

readonly venv=.venv
readonly python="$venv/bin/python"
readonly log="$venv/setup.log"
readonly extras=dev,docs,nixl,mooncake-cpu,plot,examples
readonly build_requirements=(scikit-build-core nanobind cmake ninja)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

info() { printf 'setup: %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# Runs a command with its output in the log file. Prints the end of it if the command fails.
quietly() {
  if ! "$@" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    fail "failed: $*"
  fi
}

can_apt() { [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; }

# Installs Debian packages. Updates the package lists only if the first attempt fails.
apt_install() {
  local output
  output=$(mktemp)
  local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@")
  info "installing system packages: $*"
  if ! "${install[@]}" >"$output" 2>&1 && ! { apt-get update -qq && "${install[@]}"; } >"$output" 2>&1; then
    tail -n 20 "$output" >&2
    rm -f "$output"
    fail "apt-get could not install: $*"
  fi
  rm -f "$output"
}

# `need CONDITION MESSAGE PACKAGE...`: if the condition fails, installs the packages and tries again, or fails with the message.
need() {
  local condition=$1 message=$2
  shift 2
  "$condition" && return
  if can_apt; then
    apt_install "$@"
    "$condition" && return
  fi
  fail "$message (Debian: apt-get install $*)"
}

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if recent "$name"; then
      base=$name
      return
    fi
  done
  return 1
}

# The scripts of a virtual environment contain its path, so one that was moved or copied does not work.
is_usable() { [[ -x $python ]] && recent "$python" && grep -qsF "$PWD/$venv" "$venv/bin/activate"; }

has_venv() { "$base" -c 'import ensurepip, venv' >/dev/null 2>&1; }

has_headers() { [[ -f $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]]; }

has_compiler() {
  echo '#include <span>
#include <thread>
std::jthread thread;' | "${CXX:-c++}" -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1
}

# Installs the libraries that Mooncake's wheel links to but does not contain. Everything else works without them.
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
    info "Mooncake needs these system packages, which are not installed: ${missing[*]} (as root: apt-get install ${missing[*]})"
  fi
}

fingerprint() { { "$python" -VV && sha256sum "$@"; } | sha256sum; }

# Whether the named step was last completed with this fingerprint.
is_done() { [[ -f $venv/$1.stamp && $(<"$venv/$1.stamp") == "$2" ]]; }

if [[ -n ${PYTHON:-} ]]; then
  find_python || fail "PYTHON=$PYTHON: expected Python 3.11 or newer, found $({ "$PYTHON" -V || echo none; } 2>/dev/null)"
else
  need find_python "Python 3.11 or newer was not found; PYTHON=... names an interpreter" python3
fi
if ! is_usable; then
  need has_venv "$base cannot create virtual environments" python3-venv
  info "creating $venv with $("$base" -V)"
  rm -rf "$venv"
  "$base" -m venv "$venv"
fi

mooncake_libraries

mapfile -t sources < <(find CMakeLists.txt csrc -type f \( -name CMakeLists.txt -o -name '*.hpp' -o -name '*.cpp' \) | LC_ALL=C sort)
packages=$(fingerprint pyproject.toml constraints-dev.txt scripts/setup.sh)
extension=$(fingerprint pyproject.toml constraints-dev.txt scripts/setup.sh "${sources[@]}")
if is_done packages "$packages" && is_done extension "$extension"; then
  info "$venv is up to date"
  exit
fi

need has_compiler "a C++20 compiler was not found; CXX=... names one" g++
need has_headers "the headers of $("$python" -V) were not found" python3-dev

pip=("$python" -m pip install -q --constraint constraints-dev.txt)
export SKBUILD_CMAKE_DEFINE="DISAGG_STRICT=ON"
if is_done packages "$packages"; then
  info "building the extension module"
  quietly "${pip[@]}" --no-build-isolation --no-deps --editable .
else
  info "installing build tools"
  quietly "${pip[@]}" "${build_requirements[@]}"
  info "installing packages and building the extension module (takes 2 to 12 minutes the first time)"
  quietly "${pip[@]}" --no-build-isolation --editable ".[$extras]"
fi
"$python" -c 'import disagg.core._native' || fail "the extension module cannot be imported"
echo "$packages" >"$venv/packages.stamp"
echo "$extension" >"$venv/extension.stamp"
info "$venv is ready"
