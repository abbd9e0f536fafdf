#!/usr/bin/env bash
# The GPU tests of the kernels under compute-sanitizer's memcheck, several files at a time, the first cases of each test. A
# line a file, with what was found; ends with 1 unless every file has run to its end, and clean. Takes up to 3 minutes.
#   bench/gpu/sanitizer.sh [pytest's options]
#   FIRST_CASES=9: more cases; TOOL=racecheck: another tool; JOBS: files at a time; LIMIT_S, FILE_S: seconds in
#   all, and of a file; LOGS: a folder for what they print
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="bench:bench/gpu:kernels:kvtransfer:proto:services:tests/support${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # else what is past a tensor's end may be torch's own memory; no graphs with it
export PATH="$PATH:/usr/local/cuda/bin" OMP_NUM_THREADS=1 TOOL="${TOOL:-memcheck}" ENDS_AT=$(($(date +%s) + ${LIMIT_S:-170}))
command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer here, nothing was checked: it comes with the CUDA toolkit"; exit 1; }
python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "torch finds no GPU here, nothing was checked"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export LOGS="${LOGS:-$work}" FILE_S="${FILE_S:-75}"
mkdir -p "$LOGS"
PORT_OPTION=$(compute-sanitizer --help | grep -oe --base-port | head -1)
export PORT_OPTION

# FILE [pytest's options]: the tests of a file, a port of its own for each
run() {
  local left=$((ENDS_AT - $(date +%s)))
  timeout -k 5 $((left < 1 ? 1 : left > FILE_S ? FILE_S : left)) \
    compute-sanitizer ${PORT_OPTION:+$PORT_OPTION $((20000 + BASHPID % 2000 * 20))} --tool "$TOOL" --target-processes application-only --error-exitcode 99 --print-limit 20 \
    --report-api-errors no \
    python3 -m pytest -q -x -m gpu -p no:cacheprovider -p no:xdist -p first_cases --confcutdir=tests/kernels --timeout=0 \
    -k "not 32k and not long and not graph and not captured" "${@:2}" "$1"
}

# FILE [pytest's options]: writes a log, prints a line, returns whether the file is clean
check() {
  local name began=$SECONDS code ran found
  name=$(basename "$1" .py)
  run "$@" >"$LOGS/$name.log" 2>&1
  code=$?
  if [ "$code" = 124 ] && ! grep -q '^[.sF]' "$LOGS/$name.log"; then # it never began: the tool waits for its own process
    run "$@" >"$LOGS/$name.log" 2>&1
    code=$?
  fi
  ran=$(grep -E '^[0-9]+ (passed|failed|skipped|deselected|error)' "$LOGS/$name.log" | tail -1)
  found=$(grep -oE '(ERROR|RACECHECK) SUMMARY: .*' "$LOGS/$name.log" | tail -1)
  [ "$code" = 124 ] && found="out of time"
  if [ "$code" = 0 ] && [[ $found == *"SUMMARY: 0 "* ]] && [[ $ran == *passed* ]]; then
    echo "clean      $name: $found; ${ran%% in *} in $((SECONDS - began)) s"
    return 0
  fi
  echo "NOT CLEAN  $name: ${found:-no summary}; ${ran:-no test has ended} (exit status $code)"
  grep -m 1 -A 12 -E '^========= (Invalid|Error|Uninit|Race|Warning|Device)|^E  ' "$LOGS/$name.log" || tail -5 "$LOGS/$name.log"
  return 1
}
export -f run check

cores=$(env -u OMP_NUM_THREADS nproc) # nproc prints that variable where it is set
# the longest files first
grep -lE 'device: torch.device|mark\.gpu' tests/kernels/gpu/{,*/}test_*.py | xargs ls -S |
  xargs -P "${JOBS:-$((cores > 7 ? 6 : (cores + 1) / 2))}" -I{} bash -c 'check "$@"' _ {} "$@"
code=$?
echo "$([ $code = 0 ] && echo all clean || echo not clean) under $TOOL, in $SECONDS s"
[ $code = 0 ]
