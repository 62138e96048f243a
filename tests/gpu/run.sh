#!/bin/sh
# Runs the CUDA tests of a built test binary on a machine with an NVIDIA GPU, plain and under
# compute-sanitizer, all at once: most of the time goes into what the host computes to compare with. One
# summary line a step; logs go to the folder. Exit 1 when any step failed.
#   usage: tests/gpu/run.sh TEST_BINARY LOG_FOLDER [GTEST_FILTER]
set -u
if [ $# -lt 2 ]; then
  sed -n 's/^# *usage: /usage: /p' "$0" >&2
  exit 2
fi
binary=$1
logs=$2
filter=${3:-*Cuda*:*Sm90*}
mkdir -p "$logs"
PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
failed=0

# step NAME SECONDS COMMAND…: its log is LOG_FOLDER/NAME.log, its summary NAME.line, its exit status NAME.code.
step() {
  name=$1
  limit=$2
  shift 2
  log=$logs/$name.log
  begin=$(date +%s)
  timeout "$limit" "$@" >"$log" 2>&1
  code=$?
  seconds=$(($(date +%s) - begin))
  if [ "$code" -eq 124 ]; then
    echo "timed out after $limit s" >>"$log"
  fi
  # Skipping everything is no success here.
  if [ "$code" -eq 0 ] && grep -q 'no NVIDIA GPU' "$log"; then
    code=1
  fi
  if [ "$code" -eq 0 ] && ! grep -q 'PASSED' "$log"; then
    code=1
  fi
  echo "$code" >"$logs/$name.code"
  echo "$name: exit $code, $seconds s: $(grep -E 'PASSED|SKIPPED  |FAILED  .* tests|ERROR SUMMARY|RACECHECK SUMMARY|timed out' "$log" |
    grep -vE '\] (Cuda|Sm90)' | tr -s ' =' ' ' | tr '\n' ';')" >"$logs/$name.line"
}

# sanitize TOOL SECONDS FILTER [OPTION…]
sanitize() {
  tool=$1
  limit=$2
  tests=$3
  shift 3
  step "$tool" "$limit" compute-sanitizer --tool "$tool" --error-exitcode 3 "$@" "$binary" "--gtest_filter=$tests"
}

if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$logs/gpu.txt"
fi
steps=tests
step tests 180 "$binary" "--gtest_filter=$filter" &
if command -v compute-sanitizer >/dev/null; then
  # Instrumented kernels are tens of times slower: the hundred repeats add nothing here.
  slow="$filter:-*Repeat*:*MoreTokens*"
  steps='tests memcheck initcheck racecheck racecheck_sm90'
  sanitize memcheck 240 "$slow" --leak-check full &
  sanitize initcheck 240 "$slow" &
  sanitize racecheck 400 "$slow:*LongSums*:*EveryLayout/simt*:Sm90*" &
  step racecheck_sm90 400 compute-sanitizer --tool racecheck --error-exitcode 3 "$binary" \
    "--gtest_filter=Sm90*:-*Repeat*:*MoreTokens*:*ManyTokens*" &
else
  echo "compute-sanitizer: not found, nothing was sanitized"
  failed=1
fi
wait
for name in $steps; do
  cat "$logs/$name.line"
  if [ "$(cat "$logs/$name.code")" -ne 0 ]; then
    failed=1
  fi
done
exit $failed
