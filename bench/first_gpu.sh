#!/usr/bin/env bash
# The first checks and measurements on a GPU, in one command with a time limit.
#
#   bench/first_gpu.sh [folder]                   six minutes: kernels against their twins, a captured
#                                                 step, training steps, rows, tests
#   bench/first_gpu.sh --seconds 600 [folder]     the same parts, each with its share of that
#   bench/first_gpu.sh --only "tests/step -k clip" [folder]    the tests that were mended, first
#   bench/first_gpu.sh --tools [folder]           150 s: compute-sanitizer on every kernel, ncu on
#                                                 those that the selftest times
#   bench/first_gpu.sh --wheels wheels [folder]   packages that are absent there, from a folder
#
# Results are lines of JSON in the folder (bench/results/<gpu>-<date>): selftest.jsonl, rows.jsonl,
# tests.jsonl, parts.jsonl; summary.txt is a copy of the output; logs.tar.gz holds the logs. Results
# written before a cut or a kill remain. Exit status 1: a part failed. Without a GPU it is a dry run
# of the same parts, on the CPU at toy size.
#
# It takes nothing from the network, needs no Git, and installs nothing: where Python finds no
# tritonamp, or another one, a copy of this tree runs. TRITONAMP_COMMIT names the commit where there
# is no .git; PYTHON is the interpreter (python3).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
exec "${PYTHON:-python3}" "$root/bench/first_gpu.py" "$@"
