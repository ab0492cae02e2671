#!/usr/bin/env bash
# Groups of prefill and decode ranks on all GPUs of a host, 2, 4 or 8: every link between them at once, beside plain copies and
# products of matrices. With STEPS="many vllm" also vLLM at the largest TP that fits on both sides, this project's connector beside
# NixlConnector and one that moves nothing. Builds the extension module if it is missing. The first argument is the folder for
# results (default: out/gpu). PYTHON: the interpreter, with vLLM for that step.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly python=${PYTHON:-python3} out=${1:-out/gpu}
STEPS=none scripts/gpu_all.sh "$out" || exit 1 # builds
export PYTHONPATH="$PWD:$out/site:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 1
for step in ${STEPS:-many}; do
  echo "== $step on $gpus GPUs"
  case $step in
    many) timeout "${LIMIT_S:-550}" "$python" -m benchmarks.gpu.many --json "$out/nvlink-many-$gpus.json" 2>&1 | tee "$out/many.log" ;;
    vllm)
      tp=$((gpus / 2)) limit=${LIMIT_S:-590}
      timeout "$limit" "$python" -m benchmarks.gpu.vllm_servers --gpus "$gpus" --prefill-tp "$tp" --decode-tp "$tp" --clients 64 \
        --limit-s $((limit - 50)) --connectors nvlink NixlConnector nothing floor --json "$out/vllm-$gpus-gpus.json" 2>&1 |
        tee "$out/vllm-many.log"
      ;;
  esac
done
