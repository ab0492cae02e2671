#!/usr/bin/env bash
# Installs routers of other projects (scripts/routers_requirements.txt), and prints the directory that a `PYTHONPATH` of the
# environment of vLLM or SGLang needs for them: ${XDG_CACHE_HOME:-~/.cache}/disagg/routers-DIGEST, which all checkouts share. PYTHON
# names another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly base="${PYTHON:-python3}" requirements=scripts/routers_requirements.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

digest=$({ "$base" -VV && uname -m && cat "$requirements"; } | sha256sum | cut -c 1-16)
readonly cache="${XDG_CACHE_HOME:-$HOME/.cache}/disagg/routers-$digest"
mkdir -p "$(dirname "$cache")"

exec 9>"$cache.lock"
flock 9
if [[ ! -d $cache ]]; then
  rm -rf "$cache.partial"
  if ! "$base" -m pip install -q --no-deps --only-binary :all: --target "$cache.partial" -r "$requirements" >"$cache.log" 2>&1; then
    printf 'routers_env: pip cannot install %s: %s\n' "$requirements" "$(grep -m 1 '^ERROR' "$cache.log")" >&2
    exit 1
  fi
  mv "$cache.partial" "$cache"
fi
flock -u 9
echo "$cache"
