#!/usr/bin/env bash
# Everything that needs a GPU, on a machine that has one: tests, then benchmarks on cuda.
#
#     benchmarks/gpu.sh [PART...]     triton recipes tests compiled traces overhead limits predictions analysis truth memory
#
# All of them, in that order, where none is named.
#
# Takes 8 minutes at most (GPU_SECONDS): what would come later is left out, and said. gradscope need not be installed.
# Results are appended to $RESULTS (benchmarks/results) as JSON lines, whole outputs to $LOG; what is printed is short,
# the table of the recipes last. The exit code is 1 if any part failed or was left out.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

python=${PYTHON:-python3}
results=${RESULTS:-benchmarks/results}
log=${LOG:-$(mktemp --suffix=.log)}
deadline=$((SECONDS + ${GPU_SECONDS:-480}))
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(triton recipes tests compiled traces overhead limits predictions analysis truth memory)
export PYTHONPATH="$PWD/benchmarks/from_source:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# Plugins of the machine's own are not asked: one that warns would fail the tests, where warnings are errors.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
mkdir -p "$results"
failed=0
table=

"$python" - <<'PY' || exit 2
import sys
import torch
if not torch.cuda.is_available():
    sys.exit("this machine has no CUDA device that torch can use")
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
PY

part() { # part NAME SECONDS LINES COMMAND...: run one part within its time, print its last lines
  local name=$1 seconds=$2 lines=$3 left=$((deadline - SECONDS)) began=$SECONDS code out
  shift 3
  if [ "$left" -lt 10 ]; then
    echo "== $name: LEFT OUT, no time"
    failed=1
    return
  fi
  out=$(mktemp)
  timeout --signal=INT --kill-after=10 "$((seconds < left ? seconds : left))" "$@" >"$out" 2>&1
  code=$?
  { echo "== $name: $*"; cat "$out"; } >>"$log"
  if [ "$code" -eq 0 ]; then
    echo "== $name: $((SECONDS - began)) s"
  else
    echo "== $name: FAILED (exit $code), $((SECONDS - began)) s"
    failed=1
  fi
  if [ "$name" = recipes ]; then
    table=$out # printed last, so that a cut output still holds it
  else
    tail -n "$lines" "$out" | cut -c-160
    rm -f "$out"
  fi
}

tests() { # tests ARGUMENT...: pytest, in several processes where it can
  local several=()
  "$python" -c "import xdist" 2>/dev/null && several=(-p xdist.plugin -n "${GPU_JOBS:-14}")
  "$python" -m pytest -q -p no:cacheprovider "${several[@]}" "$@"
}
export -f tests
export python

for name in "${parts[@]}"; do
  case $name in
    # What only compiles needs no GPU, and starts programs that do not find a checkout.
    triton) part "$name" 180 6 bash -c 'tests tests/recipes -k "triton and not compiles"' ;;
    recipes)
      part "$name" 270 0 "$python" benchmarks/recipe_gpu --seconds "${RECIPE_SECONDS:-200}" --json "$results/recipes_gpu.jsonl"
      ;;
    tests)
      mapfile -t marked < <(grep -rl --include='test_*.py' 'mark\.gpu' tests | grep -v '^tests/compiled')
      # Those of compiled code are a part of their own. Those of block sizes take half a minute each: part triton runs
      # them side by side.
      part "$name" 100 4 "$python" -m pytest -q -p no:cacheprovider -m gpu -k "not blocks_of_this_device" "${marked[@]}"
      ;;
    compiled)
      part "$name" 60 5 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/compiled/test_cuda.py
      part "$name" 60 8 "$python" benchmarks/compiled.py --device cuda --json "$results/compiled.jsonl"
      for model in llama llama_by_layer resnet50; do
        part "$name" 90 8 "$python" benchmarks/compiled.py --device cuda --json "$results/compiled.jsonl" \
          "benchmarks/compiled_models.py:$model"
      done
      part "$name" 240 8 "$python" benchmarks/compiled_cost.py --device cuda --rounds 1 --step-rounds 3 \
        --json "$results/compiled_cost.jsonl"
      ;;
    traces) part "$name" 60 12 "$python" benchmarks/traces.py --device cuda --json "$results/traces.jsonl" ;;
    overhead) part "$name" 90 8 "$python" benchmarks/overhead.py --device cuda --json "$results/overhead.jsonl" ;;
    limits) part "$name" 45 9 "$python" benchmarks/limits.py --device cuda --json "$results/limits.jsonl" ;;
    predictions)
      part "$name" 90 4 "$python" benchmarks/predictions.py --device cuda --json "$results/predictions.jsonl"
      ;;
    analysis)
      part "$name" 100 8 "$python" benchmarks/analysis.py --device cuda --events 100000 400000 --json "$results/analysis.jsonl"
      ;;
    truth) part "$name" 40 6 "$python" benchmarks/truth_table.py --json "$results/truth.jsonl" ;;
    memory) part "$name" 90 6 "$python" benchmarks/memory.py --device cuda --rounds 2 --json "$results/memory.jsonl" ;;
    *)
      echo "no part $name: triton recipes tests compiled traces overhead limits predictions analysis truth memory" >&2
      exit 2
      ;;
  esac
done
if [ -n "$table" ]; then
  cut -c-160 "$table"
  rm -f "$table"
fi
echo "whole outputs: $log"
exit "$failed"
