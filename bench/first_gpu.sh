#!/usr/bin/env bash
# What a machine with a GPU can say of this checkout, in one command that ends inside nine minutes.
#
#   bench/first_gpu.sh [folder]            the selftest, the tests that a GPU changes, measurements
#   bench/first_gpu.sh --tools [folder]    compute-sanitizer and ncu on every kernel, where they are
#
# Writes into the folder (bench/results/<gpu>-<date>) alone, and ends with a summary, which is there
# as summary.txt, too. Takes nothing from the network; this checkout is installed where Python does
# not find it. Each part has a time limit and a log of its own, and runs whatever became of the one
# before; exit status 1 where one failed. Without a GPU it is a dry run: the same parts, on the CPU
# and on a GPU in software, at toy size. PYTHON is the interpreter (python3).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
mode=measure
cores=$(env -u OMP_NUM_THREADS nproc)  # which takes that for an answer
if [ "${1:-}" = --tools ]; then
    mode=tools
    shift
fi

here='import sys, pathlib, tritonamp.kernels as k
sys.exit(pathlib.Path(k.__file__).resolve() != pathlib.Path("kernels/__init__.py").resolve())'
if ! "$python" -c "$here" 2>/dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation -e . || exit 2
fi

gpu=$(PYTHONPATH="$PWD/bench${PYTHONPATH:+:$PYTHONPATH}" "$python" -c 'import provenance, torch
print(provenance.slug(torch.cuda.get_device_name()) if torch.cuda.is_available() else "")') || exit 2
folder=${1:-${gpu:+bench/results/$gpu-$(date +%Y-%m-%d)}}
folder=${folder:-$(mktemp -d)}
mkdir -p "$folder" || exit 2
failed=0
say() { echo "$*" | tee -a "$folder/summary.txt"; }
: >"$folder/summary.txt" || exit 2

part() {  # name, seconds, command; what it prints goes to <name>.log
    local name=$1 limit=$2 status start=$SECONDS
    shift 2
    timeout --signal=INT --kill-after=15 "$limit" "$@" >"$folder/$name.log" 2>&1
    status=$?
    case $status in
        0) say "$name: ok, $((SECONDS - start)) s" ;;
        124 | 137) say "$name: NOT DONE in $limit s, see $name.log" ;;
        *) say "$name: FAILED with exit status $status after $((SECONDS - start)) s, see $name.log" ;;
    esac
    [ "$status" = 0 ] || failed=1
}

shown() {  # lines of a log that match, the first forty
    grep -hE "$1" "$folder/$2" 2>/dev/null | head -40 | cut -c1-300 | tee -a "$folder/summary.txt"
}

selftest() {  # what it found goes to selftest.json, how far it is to the log
    "$python" -X faulthandler -m tritonamp doctor --selftest --json >"$folder/selftest.json"
}

measure() {
    local tests=(--cuda) workers=() left sizes
    if [ -z "$gpu" ]; then
        say "no GPU: a dry run, which measures nothing"
        export OMP_NUM_THREADS=1
        tests=(--fake-cuda tests/commands/test_selftest.py)
    fi
    if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n "$cores"); fi
    "$python" -c 'import expecttest' 2>/dev/null || say "expecttest is absent; left out are:"

    export -f selftest
    export python folder
    part selftest 100 bash -c selftest
    "$python" -c 'import json, sys; from tritonamp.commands import selftest
print(selftest.text(json.load(sys.stdin)))' <"$folder/selftest.json" 2>/dev/null \
        | tee -a "$folder/summary.txt"
    part tests 200 "$python" -m pytest -q -rfEs --continue-on-collection-errors \
        "${workers[@]}" "${tests[@]}"
    shown '^(FAILED|ERROR)|expecttest|passed|failed' tests.log
    left=$((520 - SECONDS))  # what the others did not need
    sizes=(--minutes "$((left / 60)).$((left % 60 / 6))")
    [ -n "$gpu" ] || sizes=(--toy --quick --minutes 1.5)
    part measurements "$((left + 10))" "$python" bench/run.py "${sizes[@]}" --folder "$folder"
    shown '\.json$' measurements.log
    if [ -n "$gpu" ]; then
        "$python" bench/report.py --folder "$folder" >"$folder/tables.md" 2>&1
        shown '^\|' tables.md
        say "to show them: copy that .json to bench/results/, then python bench/report.py --write"
    fi
}

tools() {
    local check names='regex:^(softmax|log_softmax|sum|cast|grad_stats|adam|sgd|lion)'
    PATH=$PATH:/usr/local/cuda/bin
    if command -v compute-sanitizer >/dev/null; then
        export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # so that each tensor has bounds of its own
        for check in memcheck racecheck synccheck; do
            part "$check" 120 compute-sanitizer --tool "$check" --error-exitcode 9 \
                "$python" -m tritonamp doctor --selftest kernel
            shown 'ERROR SUMMARY|FAILED|RACECHECK SUMMARY' "$check.log"
        done
        unset PYTORCH_NO_CUDA_MEMORY_CACHING
    else
        say "compute-sanitizer is absent"
    fi
    if command -v ncu >/dev/null; then  # the second launch of each kernel, as large as it is timed
        part ncu 120 ncu --clock-control none --kernel-id "::$names:2" --section SpeedOfLight \
            --section MemoryWorkloadAnalysis --section WarpStateStats --section Occupancy \
            --section LaunchStats "$python" -m tritonamp doctor --selftest speed
        shown '^  [a-z_]+ \(|DRAM Throughput|Max Bandwidth|Achieved Occupancy|ERR' ncu.log
    else
        say "ncu is absent"
    fi
}

say "$(git describe --always --dirty 2>/dev/null || echo 'no git'), ${gpu:-no GPU}, $cores cores"
"$mode"
say "all of it is in $folder, after $SECONDS s"
exit $failed
