#!/usr/bin/env bash
# Prepares the environment of the vLLM tests and prints the path of its interpreter. The packages are installed once into
# ${XDG_CACHE_HOME:-~/.cache}/disagg/vllm-DIGEST, which all checkouts share. Each checkout has a small `.venv-vllm` that adds
# these packages and holds this project in editable mode with an extension module of its own. Repeats only the steps whose
# inputs have changed. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly base="${PYTHON:-python3}" requirements=scripts/vllm_requirements.txt venv="$PWD/.venv-vllm" max_attempts=3
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

info() { printf 'vllm_env: %s\n' "$*" >&2; }
fail() {
  info "$*"
  exit 1
}

"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || fail "$base: expected Python 3.11 or newer"
digest=$({ "$base" -VV && uname -m && cat "$requirements"; } | sha256sum | cut -c 1-16)
readonly cache="${XDG_CACHE_HOME:-$HOME/.cache}/disagg/vllm-$digest"
mkdir -p "$(dirname "$cache")"

# Runs a command with its output in a log file. Prints the end of it if the command fails.
quietly() {
  local log
  log=$(mktemp)
  if ! "$@" >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}

# Installs the packages into a new directory, which gets its final name when it is complete and has been imported.
install_packages() {
  local partial="$cache.partial" attempt
  info "installing vLLM and torch into $cache (4 GB, some minutes)"
  rm -rf "$partial"
  quietly "$base" -m venv "$partial/tools" || fail "$base cannot create virtual environments"
  for ((attempt = 1; ; attempt++)); do
    rm -rf "$partial/packages"
    quietly "$partial/tools/bin/python" -m pip install -q --retries 5 --no-deps --only-binary :all: \
      --target "$partial/packages" -r "$requirements" && break
    ((attempt < max_attempts)) || fail "the packages of $requirements cannot be downloaded; $max_attempts attempts failed"
    info "attempt $attempt of $max_attempts failed; trying again"
  done
  PYTHONPATH="$partial/packages" "$partial/tools/bin/python" -c '
import sys, torch
if torch.version.cuda is not None:
    sys.exit(f"torch {torch.__version__} is a build for CUDA: configure pip with the index of builds for the CPU")' ||
    fail "the packages cannot be used"
  rm -rf "$partial/tools" "$cache"
  mv "$partial" "$cache"
}

exec 9>"$cache.lock"
flock 9
[[ -d $cache/packages ]] || install_packages
flock -u 9

# The scripts of a virtual environment contain its path, so one in a checkout that was moved does not work.
stamp=$({ echo "$venv $digest" && find CMakeLists.txt csrc pyproject.toml scripts/vllm_env.sh -type f -print0 | LC_ALL=C sort -z |
  xargs -0 sha256sum; } | sha256sum)
if [[ $(cat "$venv/stamp" 2>/dev/null) != "$stamp" ]]; then
  info "building the extension module for .venv-vllm"
  rm -rf "$venv"
  quietly "$base" -m venv "$venv" || fail "$base cannot create virtual environments"
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$cache/packages')" >"$site/vllm-packages.pth"
  quietly "$venv/bin/python" -m pip install -q --no-build-isolation --no-deps -C build-dir=build/vllm --editable . ||
    fail "the extension module cannot be built (g++ and the headers of Python are needed)"
  "$venv/bin/python" -c 'import disagg.core._native' || fail "the extension module cannot be imported"
  echo "$stamp" >"$venv/stamp"
fi
echo "$venv/bin/python"
