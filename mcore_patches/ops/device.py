"""What a GPU offers to kernels, and the tiles that follow from it. The choices are pure functions of plain values."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

HOPPER = "sm_90a"
HOPPER_SHARED_BYTES = 227 * 1024
FIRST_ARCH_WITH_BF16_MATRIX_UNITS = 80
BARRIER_BYTES = 1024  # barriers and the alignment of the first tile


@dataclass(frozen=True)
class Device:
    """arch as compilers spell it ("sm_90a"), shared memory that one block may take, number of multiprocessors."""

    arch: str
    shared_bytes: int
    multiprocessors: int


def arch_name(major: int, minor: int) -> str:
    """Compiler's name of a compute capability, with the instructions of that chip alone from Hopper on."""
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}{minor}"


def has_matrix_units(arch: str) -> bool:
    """Whether the GPUs of an architecture multiply bfloat16 matrices by `mma.sync`."""
    return int("".join(c for c in arch if c.isdigit())) >= FIRST_ARCH_WITH_BF16_MATRIX_UNITS


def takes_hopper_kernels(arch: str, shared_bytes: int) -> bool:
    """Whether the kernels written for Hopper run; elsewhere there are plain ones, for any GPU with matrix units."""
    return arch == HOPPER and shared_bytes >= HOPPER_SHARED_BYTES


@functools.cache
def describe(device: torch.device) -> Device:
    """The `Device` behind a CUDA device with an index."""
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Device(arch_name(properties.major, properties.minor), shared_bytes, properties.multi_processor_count)


def device_of(device: torch.device) -> Device:
    """The `Device` behind a CUDA device, the current one if it has no index; ValueError where there is none."""
    try:
        return describe(torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index))
    except (RuntimeError, AssertionError) as error:
        if torch.cuda.is_available():
            raise
        raise ValueError(f"device must be a CUDA device, got {device}: torch finds none on this machine") from error


def cuda_device(op: str, device: torch.device | str, kind: str = "cuda") -> torch.device:
    """`device`, or ValueError if kernels cannot be built for it: it is not of this `kind`."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):  # what names no device; the text of torch's error is of no use here
        found = None
    if found is None or found.type != kind:
        raise ValueError(f"{op}: device must be a {kind.upper()} device, got {device}")
    return found


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work: heads and keys of a block, stages of its pipeline, threads."""

    heads: int
    keys: int
    stages: int
    threads: int

    def __str__(self) -> str:
        return f"{self.heads}x{self.keys}"


# Warps lie side by side, 8 keys each at least; sums of out or dq then take 128 registers a thread at most.
PLAIN_FORWARD_TILES = (Tiles(32, 64, 2, 256), Tiles(32, 32, 2, 128), Tiles(16, 32, 2, 128))
PLAIN_BACKWARD_TILES = (Tiles(32, 64, 1, 256), Tiles(16, 32, 1, 128))


@dataclass(frozen=True)
class SparseMLADesign:
    """Which kernels sparse MLA takes: tiles of the plain ones, or None for those written for Hopper."""

    forward: Tiles | None
    backward: Tiles | None

    @property
    def backward_heads(self) -> int:
        """Heads that one block of the backward takes."""
        return 64 if self.backward is None else self.backward.heads


def sparse_mla_design(
    arch: str, shared_bytes: int, dtype: torch.dtype, width: int, value_width: int, heads: int
) -> SparseMLADesign | str:
    """The kernels for a GPU, a head width and a number of heads, or the reason why there are none.

    Hopper has kernels of its own. Elsewhere: of the tiles that fit shared memory those that take the fewest blocks, as
    every key gathered serves all heads of a block, and of these the ones with the fewest heads to a block.
    """
    if dtype != torch.bfloat16:
        return f"q and kv must be bfloat16, got {str(dtype).removeprefix('torch.')}"
    if width not in (512, 576) or value_width != 512:
        return f"q's width must be 512 or 576 and v_channels 512, got {width} and {value_width}"
    if not has_matrix_units(arch):
        return f"{arch} has no bfloat16 matrix units"
    if takes_hopper_kernels(arch, shared_bytes):
        return SparseMLADesign(None, None)
    forward = [t for t in PLAIN_FORWARD_TILES if plain_shared_bytes(t, width, 0) <= shared_bytes]
    backward = [t for t in PLAIN_BACKWARD_TILES if plain_shared_bytes(t, width, value_width) <= shared_bytes]
    if not forward or not backward:
        return f"{arch} lets a block have {shared_bytes} bytes of shared memory, too few for width {width}"

    def cost(tiles: Tiles) -> tuple[int, int]:
        return -(-heads // tiles.heads), tiles.heads

    return SparseMLADesign(min(forward, key=cost), min(backward, key=cost))


def plain_shared_bytes(tiles: Tiles, width: int, dout_width: int) -> int:
    """Shared memory of a plain kernel: q, stages of keys, P; with dout_width > 0 (the backward) dout and dS too."""
    heads, keys = tiles.heads, tiles.keys
    products = 2 if dout_width else 1
    elements = heads * (width + dout_width) + tiles.stages * keys * width + products * heads * keys
    return 2 * elements + BARRIER_BYTES
