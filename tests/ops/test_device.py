import pytest
import torch

from mcore_patches.ops import device
from mcore_patches.ops.device import (
    PLAIN_BACKWARD_TILES,
    PLAIN_FORWARD_TILES,
    SparseMLADesign,
    Tiles,
    arch_name,
    plain_shared_bytes,
    sparse_mla_design,
)

KIB = 1024
# Opt-in shared memory of a block, from the CUDA programming guide.
GPUS = [("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90a", 227), ("sm_100a", 227), ("sm_120a", 99)]


def choose(
    arch: str, kib: int, width: int = 576, value_width: int = 512, dtype: torch.dtype = torch.bfloat16, heads: int = 128
):
    return sparse_mla_design(arch, kib * KIB, dtype, width, value_width, heads)


@pytest.mark.parametrize(
    ("capability", "name"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a")]
)
def test_arch_is_spelt_as_compilers_do(capability: tuple[int, int], name: str) -> None:
    assert arch_name(*capability) == name


@pytest.mark.parametrize("width", [512, 576])
@pytest.mark.parametrize(("arch", "kib"), GPUS)
def test_every_gpu_with_bf16_has_kernels_that_fit(arch: str, kib: int, width: int) -> None:
    design = choose(arch, kib, width)
    assert isinstance(design, SparseMLADesign)
    if arch == "sm_90a":
        assert design == SparseMLADesign(None, None)
        assert design.backward_heads == 64
        return
    assert design.forward in PLAIN_FORWARD_TILES
    assert design.backward in PLAIN_BACKWARD_TILES
    assert plain_shared_bytes(design.forward, width, 0) <= kib * KIB
    assert plain_shared_bytes(design.backward, width, 512) <= kib * KIB
    assert design.backward_heads == design.backward.heads


@pytest.mark.parametrize(("arch", "kib", "heads"), [("sm_80", 163, 32), ("sm_89", 99, 16), ("sm_100a", 227, 32)])
def test_more_shared_memory_takes_more_heads(arch: str, kib: int, heads: int) -> None:
    design = choose(arch, kib)
    assert (design.forward.heads, design.backward.heads) == (heads, heads)


@pytest.mark.parametrize(("arch", "kib"), [("sm_80", 163), ("sm_89", 99), ("sm_100a", 227)])
@pytest.mark.parametrize("width", [512, 576])
def test_no_more_heads_to_a_block_than_it_takes(arch: str, kib: int, width: int) -> None:
    many = choose(arch, kib, width)
    for heads in range(1, 129):
        design = choose(arch, kib, width, heads=heads)
        for few, most in ((design.forward, many.forward), (design.backward, many.backward)):
            assert few.heads == (16 if heads <= 16 else most.heads)
            assert -(-heads // few.heads) == -(-heads // most.heads), "as many blocks"


def test_tiles_suit_the_matrix_unit() -> None:
    for tiles in (*PLAIN_FORWARD_TILES, *PLAIN_BACKWARD_TILES):
        warps = tiles.threads // 32
        assert tiles.heads % 16 == 0
        assert tiles.keys >= 8 * warps  # warps lie side by side along the keys
        assert tiles.heads * 576 // tiles.threads <= 144  # registers of the sums


def test_shared_bytes_by_hand() -> None:
    tiles = Tiles(heads=16, keys=32, stages=2, threads=128)
    assert plain_shared_bytes(tiles, 576, 0) == 2 * (16 * 576 + 2 * 32 * 576 + 16 * 32) + 1024
    backward = Tiles(heads=16, keys=32, stages=1, threads=128)
    assert plain_shared_bytes(backward, 576, 512) == 2 * (16 * 576 + 16 * 512 + 32 * 576 + 2 * 16 * 32) + 1024


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"arch": "sm_75", "kib": 64}, "sm_75 has no bfloat16 matrix units"),
        ({"arch": "sm_90a", "kib": 227, "dtype": torch.float16}, "q and kv must be bfloat16, got float16"),
        ({"arch": "sm_90a", "kib": 227, "width": 128}, "512 or 576 and v_channels 512, got 128 and 512"),
        ({"arch": "sm_90a", "kib": 227, "value_width": 256}, "512 or 576 and v_channels 512, got 576 and 256"),
        ({"arch": "sm_80", "kib": 48}, "49152 bytes of shared memory, too few for width 576"),
    ],
)
def test_reason_names_what_does_not_fit(arguments: dict, reason: str) -> None:
    result = choose(**arguments)
    assert isinstance(result, str)
    assert reason in result


def test_hopper_with_too_little_shared_memory_takes_the_plain_kernels() -> None:
    assert choose("sm_90a", 163) == choose("sm_80", 163)


@pytest.mark.parametrize(("named", "meant"), [("cuda", 3), ("cuda:1", 1)])
def test_device_without_an_index_is_the_current_one(named: str, meant: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(device, "describe", lambda found: found)
    assert device.device_of(torch.device(named)) == torch.device("cuda", meant)
