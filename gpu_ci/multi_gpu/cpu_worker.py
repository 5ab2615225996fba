"""`worker.work` for the CPU: with the imports done once, before the ranks are forked, as no CUDA is in the way."""

from gpu_ci.multi_gpu import scaling, training, world  # noqa: F401
from gpu_ci.multi_gpu.worker import work

__all__ = ["work"]
