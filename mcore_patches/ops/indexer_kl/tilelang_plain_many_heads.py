# The language of kernels is not typed.
# mypy: ignore-errors
"""What :mod:`tilelang_many_heads` does, for any GPU with bf16 matrix units: its text, multiplied by `mma.sync`."""

from mcore_patches.ops.indexer_kl.tilelang_many_heads import many_heads_kernel
from mcore_patches.ops.tilelang_warp import PLAIN_PASS_CONFIGS as PASS_CONFIGS  # noqa: F401


def plain_many_heads_kernel(**arguments):
    """Build a kernel with the arguments and results of `many_heads_kernel`, which names the arguments here."""
    return many_heads_kernel(**arguments, wgmma=False)
