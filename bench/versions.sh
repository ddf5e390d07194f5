#!/usr/bin/env bash
# The plain tests, and the gates on machine code, with every supported torch and the Triton it brings.
#
#   bench/versions.sh                        every pair of Python and torch
#   bench/versions.sh 3.12:2.13 3.13:2.15    these pairs
#
# Each pair gets an environment of its own, which is removed after it, so that one at a time takes
# disk: about 8 GB, and ten minutes on two cores. Its row in bench/results/versions.md is replaced,
# also where something failed; exit status 1 where one did. A Python is looked for as python3.N, then
# among pyenv's. ARCH="75 90" in the environment names other architectures for the gates.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
unset PYTHONPATH PYTHONHOME
pythons=(3.10 3.11 3.12 3.13)
torches=(2.11 2.12 2.13 2.14 2.15)
architectures=(${ARCH:-90 gfx942})
table=bench/results/versions.md

pairs=("$@")
if [ $# = 0 ]; then
    for torch in "${torches[@]}"; do
        for python in "${pythons[@]}"; do pairs+=("$python:$torch"); done
    done
fi
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

find_python() {  # 3.N
    local candidate
    for candidate in "python$1" "$(pyenv root 2>/dev/null)"/versions/"$1".*/bin/python; do
        "$candidate" -c '' 2>/dev/null && echo "$candidate" && return
    done
    echo "expected Python $1 as python$1 or among pyenv's, found none" >&2
    return 1
}

install() {  # 3.N, torch: a copy of this tree, and an environment for it
    local base
    base=$(find_python "$1") || return
    rm -rf "$tmp/src" "$tmp/env"
    mkdir "$tmp/src"
    git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$tmp/src"
    (cd "$tmp/src" && git init --quiet && git add --all)  # a test asks git which files there are
    "$base" -m venv "$tmp/env"
    echo "torch==$2.*" >"$tmp/constraints.txt"
    (cd "$tmp/src" && "$tmp/env/bin/pip" install --quiet -c "$tmp/constraints.txt" -e ".[test]")
}

versions() { "$tmp/env/bin/python" -c 'import platform, torch, triton
print(platform.python_version(), torch.__version__, triton.__version__, sep=" | ")'; }

row() {  # 3.N, torch
    local failed=0 tests builds found="$1 | $2 | none" commit
    commit=$(git describe --always --dirty --abbrev=12 --exclude="*" 2>/dev/null)
    if install "$1" "$2" && found=$(versions); then
        PATH=$tmp/env/bin:$PATH
        (cd "$tmp/src" && pytest) 2>&1 | tee "$tmp/tests.log" || failed=1
        tests=$(tail -1 "$tmp/tests.log" | grep -oE '[0-9]+ (failed|passed|errors?|skipped)' \
            | paste -sd, | sed 's/,/, /g')
        (cd "$tmp/src" && python bench/static.py --arch "${architectures[@]}") >"$tmp/builds.log" \
            2>"$tmp/faults.log" || failed=1
        builds="$(wc -l <"$tmp/builds.log") builds for ${architectures[*]}, "
        builds+="$(grep -cE '^(sm_|gfx)' "$tmp/faults.log") faults"
        cat "$tmp/faults.log"
    else
        tests="cannot be installed" builds="" failed=1
    fi
    grep -vF "| ${found% | *} |" "$table" >"$tmp/table"
    echo "| $found | $tests | $builds | $commit | $(date +%Y-%m-%d) |" >>"$tmp/table"
    (sed '/^| [0-9]/,$d' "$tmp/table"; grep '^| [0-9]' "$tmp/table" | sort -t'|' -k3,3V -k2,2V) >"$table"
    return $failed
}

status=0
for pair in "${pairs[@]}"; do
    printf '\n=== Python %s, torch %s\n' "${pair%:*}" "${pair#*:}"
    (row "${pair%:*}" "${pair#*:}") || status=1
    grep '^| [0-9]' "$table"
done
exit $status
