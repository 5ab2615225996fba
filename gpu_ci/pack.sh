#!/usr/bin/env bash
# Pack what the GPU suite needs for a machine that has PyTorch, nvcc and pytest but no network.
#
#   gpu_ci/pack.sh [OUT]                                  # default: .gpu/site.tar.xz, about 46 MB
#   MCORE=0.19.0 TILELANG=0.1.12 gpu_ci/pack.sh           # other pins
#   EXTRA="mcore-bridge==1.6.5" gpu_ci/pack.sh            # further wheels, each without its dependencies
#
# On the GPU machine (Linux x86-64, Python 3.12), in the checkout:
#   mkdir -p /tmp/site && tar xJf .gpu/site.tar.xz -C /tmp/site
#   PYTHONPATH=/tmp/site:$PWD gpu_ci/run.sh
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.gpu/site.tar.xz}
mcore=${MCORE:-0.19.2} tilelang=${TILELANG:-0.1.15}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3.12)}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
# tilelang pins its FFI package to one release: 0.1.12 goes with 0.1.11, later ones with 0.1.12.
case $tilelang in 0.1.12) ffi=0.1.11 ;; *) ffi=0.1.12 ;; esac
read -ra extra <<<"${EXTRA:-}"
"$python" -m pip install --quiet --no-deps --no-compile --only-binary=:all: --target "$work/site" \
    "megatron-core==$mcore" "tilelang==$tilelang" "apache-tvm-ffi==$ffi" z3-solver==4.15.4.0 wrapt packaging "${extra[@]}"
rm -rf "$work/site/bin"
find "$work/site" -name '*.so' -exec strip --strip-unneeded {} +
mkdir -p "$(dirname "$out")"
tar -C "$work/site" -c . | xz -T0 -6 >"$out"
echo "megatron-core $mcore, tilelang $tilelang -> $out ($(stat -c %s "$out") bytes)"
