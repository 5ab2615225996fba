#!/usr/bin/env bash
# Run every h100-marked test in this folder (new files are found by themselves). Further arguments go to pytest.
# On a machine with a GPU, a run in which no test was executed is a failure: skipped is not passed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
log=$(mktemp); trap 'rm -f "$log"' EXIT

# Kernels compile on the CPU, several seconds each: workers compile side by side where pytest-xdist is installed.
workers=()
if "$python" -c 'import xdist' 2>/dev/null && [[ " $* " != *" -n"* ]]; then
    cores=$(nproc); workers=(-n $((cores < 12 ? cores : 12)) --dist loadgroup)
fi
# Files named as arguments are run instead of all.
where=(gpu_ci)
for argument in "$@"; do [ -e "${argument%%::*}" ] && where=(); done
set +e
"$python" -m pytest "${where[@]}" -m h100 -p no:cacheprovider "${workers[@]}" "$@" 2>&1 | tee "$log"
code=${PIPESTATUS[0]}
set -e
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && ! grep -qE '[0-9]+ passed' "$log"; then
    echo "gpu_ci/run.sh: this machine has a GPU and no test passed" >&2
    [ "$code" -ne 0 ] || code=1
fi
exit "$code"
