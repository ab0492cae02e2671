#!/usr/bin/env bash
# Builds an environment with the unmodified SGLang wheel that runs on a CPU, and prints the path of a `python` that uses it with
# this tree's `disagg`. The environment is cached outside the tree, in ${XDG_CACHE_HOME:-~/.cache}/disagg, under a digest of what
# is installed: 3.3 GB and two minutes the first time, seconds after that. Run `make setup` first, with the same Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly tree=$PWD
readonly requirements=scripts/sglang/requirements.txt
readonly site=.venv/sglang
readonly cache=${XDG_CACHE_HOME:-$HOME/.cache}/disagg
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

info() { printf 'sglang_env: %s\n' "$*" >&2; }
fail() {
  info "$*"
  exit 1
}

# Fills the cached environment. A second process that wants the same one waits; one that was interrupted is built again.
install() {
  local log=$env.log
  [[ -f $env/complete ]] && return
  info "installing SGLang into $env (about two minutes)"
  rm -rf "$env"
  .venv/bin/python -m venv "$env"
  for attempt in 1 2 3; do
    "$env/bin/pip" install --quiet --no-deps -r "$requirements" >"$log" 2>&1 && break
    ((attempt < 3)) || { tail -n 20 "$log" >&2; fail "pip could not install $requirements"; }
    info "attempt $attempt failed; trying again"
  done
  touch "$env/complete"
}

[[ -x .venv/bin/python ]] || fail "expected .venv; run make setup"
digest=$({ .venv/bin/python -VV; cat "$requirements"; } | sha256sum | cut -c -16)
readonly env=$cache/sglang-$digest
mkdir -p "$cache"
exec 9>"$env.lock"
flock 9
install
flock -u 9

# What belongs to this tree: its `disagg`, from the editable installation, and its entry points.
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
rm -rf "$site"
mkdir -p "$site"
ln -s "$packages"/{_editable_skbc_disagg.py,disagg,disagg-*.dist-info} "$tree"/scripts/sglang/{sitecustomize,cpu_engine}.py "$site"
mkdir "$site/cpu_engine-1.dist-info"
printf 'Metadata-Version: 2.1\nName: cpu_engine\nVersion: 1\n' >"$site/cpu_engine-1.dist-info/METADATA"
printf '[sglang.srt.plugins]\ncpu_engine = cpu_engine:register\n' >"$site/cpu_engine-1.dist-info/entry_points.txt"
cat >"$site/python" <<EOF
#!/bin/sh
PYTHONPATH=$tree/$site\${PYTHONPATH:+:\$PYTHONPATH} exec $env/bin/python "\$@"
EOF
chmod +x "$site/python"
"$site/python" -c 'import disagg.core._native, sglang' || fail "disagg or sglang cannot be imported"
echo "$tree/$site/python"
