#!/usr/bin/env bash
# QSA and DSA on all GPUs of this host (1, 2, 4 or 8) beside one of them: layouts, recomputation, memory, weak scaling.
# Arguments go to gpu_ci.multi_gpu.drive (--help lists them). NVLink multicast stays off: a program that uses it wrongly
# can take the GPUs of a host out of service.
set -euo pipefail
cd "$(dirname "$0")/../.."
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
exec "$python" -m gpu_ci.multi_gpu.drive "$@"
