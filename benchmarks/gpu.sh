#!/usr/bin/env bash
# Everything that needs a GPU, on a machine that has one: the tests marked gpu, then the benchmarks on cuda.
# About 8 minutes at most. Results are appended to benchmarks/results/ as JSON lines; the exit code is 1 if any part failed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

python=${PYTHON:-python3}
results=${RESULTS:-benchmarks/results}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$results"
failed=0

part() { # part NAME SECONDS COMMAND...: run one part within its time, keep its last lines
  local name=$1 seconds=$2 log
  shift 2
  log=$(mktemp)
  echo "== $name"
  if timeout "$seconds" "$@" >"$log" 2>&1; then
    tail -n 24 "$log"
  else
    echo "FAILED (exit $?)"
    tail -n 40 "$log"
    failed=1
  fi
  rm -f "$log"
}

"$python" - <<'PY' || exit 2
import sys
import torch
if not torch.cuda.is_available():
    sys.exit("this machine has no CUDA device that torch can use")
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
PY

part "tests that need a GPU" 150 "$python" -m pytest -q -m gpu tests -p no:cacheprovider
part "overhead" 120 "$python" benchmarks/overhead.py --device cuda --json "$results/overhead.jsonl"
part "analysis" 150 "$python" benchmarks/analysis.py --device cuda --events 100000 400000 --json "$results/analysis.jsonl"
part "truth beside full backward hooks" 40 "$python" benchmarks/truth_table.py --json "$results/truth.jsonl"
part "memory" 90 "$python" benchmarks/memory.py --device cuda --rounds 2 --json "$results/memory.jsonl"
part "Triton kernels of the recipes" 200 "$python" -m pytest -q tests/recipes -k triton -p no:cacheprovider
part "attention" 90 "$python" benchmarks/recipe_cases/attention_gpu.py
exit "$failed"
