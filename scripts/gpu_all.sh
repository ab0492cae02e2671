#!/usr/bin/env bash
# Runs everything that needs two GPUs. Builds the extension module if it is missing, then runs the steps named in STEPS: the kill
# test, the tests and the benchmarks. The first argument is the folder for results (default: out/gpu). PYTHON: the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly python=${PYTHON:-python3} out=${1:-out/gpu}
export PYTHONPATH="$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
mkdir -p "$out"

build() { # one compiler call, without CMake
  local nanobind include suffix
  nanobind=$("$python" -c 'import nanobind, os; print(os.path.dirname(nanobind.__file__))') || {
    echo "gpu_all: expected nanobind for $python: $python -m pip install nanobind" >&2
    return 1
  }
  include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  g++ -std=c++20 -O3 -shared -fPIC -fvisibility=hidden -DNDEBUG -w -I"$nanobind/include" -I"$nanobind/ext/robin_map/include" \
    -Icsrc -I"$include" "$nanobind/src/nb_combined.cpp" csrc/bindings*.cpp -o "disagg/core/_native$suffix" -lpthread
}

names() { # write package metadata: backends are found by entry points
  "$python" - "$out/site/disagg-0.dist-info" <<'EOF_'
import pathlib, sys, tomllib

folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
(folder / "METADATA").write_text("Metadata-Version: 2.1\nName: disagg\nVersion: 0\n")
groups = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["entry-points"]
lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups.items()]
(folder / "entry_points.txt").write_text("\n".join(lines))
EOF_
  export PYTHONPATH="$out/site:$PYTHONPATH"
}

"$python" -c 'import disagg' 2>/dev/null || build || exit 1
"$python" -c 'import importlib.metadata as m; m.version("disagg")' 2>/dev/null || names || exit 1
for step in ${STEPS:-kill tests bench request}; do
  echo "== $step"
  case $step in
    kill) timeout 180 "$python" -m benchmarks.gpu.kill 2>&1 | tee "$out/kill.jsonl" ;;
    tests) timeout 280 "$python" -m pytest -q --maxfail=12 -p no:cacheprovider -p no:benchmark tests/gpu ${PYTEST_ARGS:-} 2>&1 | tee "$out/tests.log" | tail -n 60 ;;
    bench) timeout 150 "$python" -m benchmarks.gpu.nvlink ${BENCH_ARGS:-} --json "$out/nvlink-2xh200.json" 2>&1 | tee "$out/bench.log" ;;
    engines) MC_INTRANODE_NVLINK=1 timeout 180 "$python" -m benchmarks.gpu.request --engines ${ENGINES:-nvlink nixl mooncake} --json "$out/gpu-engines-2xh200.json" 2>&1 | tee "$out/engines.log" ;;
    slots) MC_INTRANODE_NVLINK=1 timeout 120 "$python" -m benchmarks.gpu.slots --json "$out/gpu-slots-2xh200.json" 2>&1 | tee "$out/slots.log" ;;
    models) timeout 180 "$python" -m benchmarks.gpu.models --json "$out/gpu-models-2xh200.json" 2>&1 | tee "$out/models.log" ;;
    request) timeout 120 "$python" -m benchmarks.gpu.request --json "$out/nvlink-2xh200-requests.json" 2>&1 | tee "$out/request.log" ;;
  esac
done
