#!/usr/bin/env bash
# Everything that needs two GPUs: builds the extension module where it is missing, then the kill test, the tests and the
# benchmarks. Results go to the folder that is the first argument (default: out/gpu). PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly python=${PYTHON:-python3} out=${1:-out/gpu}
export PYTHONPATH="$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
mkdir -p "$out"

build() { # without CMake: one compiler call
  local nanobind include suffix
  nanobind=$("$python" -c 'import nanobind, os; print(os.path.dirname(nanobind.__file__))')
  include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  g++ -std=c++20 -O3 -shared -fPIC -fvisibility=hidden -DNDEBUG -w -I"$nanobind/include" -I"$nanobind/ext/robin_map/include" \
    -Icsrc -I"$include" "$nanobind/src/nb_combined.cpp" csrc/bindings*.cpp -o "disagg/core/_native$suffix" -lpthread
}

names() { # backends are found by the names that an installed package gives them
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
    kill) timeout 180 "$python" scripts/gpu_kill.py 2>&1 | tee "$out/kill.jsonl" ;;
    tests) timeout 280 "$python" -m pytest -q --maxfail=12 -p no:cacheprovider -p no:benchmark tests/gpu ${PYTEST_ARGS:-} 2>&1 | tee "$out/tests.log" | tail -n 60 ;;
    bench) timeout 150 "$python" scripts/gpu_bench.py ${BENCH_ARGS:-} --json "$out/nvlink-2xh200.json" --date "${DATE:-$(date +%F)}" 2>&1 | tee "$out/bench.log" ;;
    engines) MC_INTRANODE_NVLINK=1 timeout 180 "$python" scripts/gpu_request.py --engines ${ENGINES:-nvlink nixl mooncake} --json "$out/gpu-engines-2xh200.json" --date "${DATE:-$(date +%F)}" 2>&1 | tee "$out/engines.log" ;;
    slots) MC_INTRANODE_NVLINK=1 timeout 120 "$python" scripts/gpu_slots.py --json "$out/gpu-slots-2xh200.json" --date "${DATE:-$(date +%F)}" 2>&1 | tee "$out/slots.log" ;;
    models) timeout 180 "$python" scripts/gpu_models.py --json "$out/gpu-models-2xh200.json" --date "${DATE:-$(date +%F)}" 2>&1 | tee "$out/models.log" ;;
    request) timeout 120 "$python" scripts/gpu_request.py --json "$out/nvlink-2xh200-requests.json" --date "${DATE:-$(date +%F)}" 2>&1 | tee "$out/request.log" ;;
  esac
done
