"""The installed `tilelang_dsa.py` in a stub megatron that has just what the file imports, and variants of its text."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch

from tests import releases
from tests.overlay.stubs import Tree

EAV = "megatron.core.transformer.experimental_attention_variant"
DSA = f"{EAV}.ops.tilelang_dsa"
KERNELS = tuple(f"{EAV}.ops.{name}" for name in ("sparse_mla", "tilelang_sparse_mla_fwd", "tilelang_sparse_mla_bwd"))
"""What the replacement relies on besides. Here they cannot be imported, for want of what they import."""

WIDTH_TEST = "    if query.size(-1) != 576 or v_channels != 512:\n"
TOPK_TEST = "    if topk_indices.size(-1) % 64 != 0:\n        return None\n"
INDICES = "    indices_bsgk = topk_indices.unsqueeze(2)"

WIDENED = """\
    if query.size(-1) == 512 and v_channels == 512:
        query = torch.nn.functional.pad(query, (0, 64))
        key = torch.nn.functional.pad(key, (0, 64))
"""
LENGTHENED = """\
    missing = -topk_indices.size(-1) % 64
    if missing:
        topk_indices = torch.nn.functional.pad(topk_indices, (0, missing), value=-1)
"""


def upstream_text(release: str = "0.19.2", module: str = DSA) -> str:
    return releases.path(release).joinpath(*module.split(".")).with_suffix(".py").read_text()


def edited(*, widens: bool = False, lengthens: bool = False) -> str:
    """Upstream's text with either half of the fix, in words of our own."""
    text = upstream_text()
    assert text.count(WIDTH_TEST) == text.count(TOPK_TEST) == 1
    if widens:
        text = text.replace(WIDTH_TEST, WIDENED + WIDTH_TEST)
    if lengthens:
        text = text.replace(TOPK_TEST, LENGTHENED)
    return text


def dsa_module(
    root: Path, text: str | None = None, *, version: str = "0.19.2", kernels: dict[str, str] | None = None
) -> ModuleType:
    """Import `tilelang_dsa` from a stub tree; SparseMLA is None there, as without tilelang.

    kernels: module -> text, in place of upstream's.
    """
    tree = Tree(root, version)
    tree.write("megatron.core.process_groups_config", "class ProcessGroupCollection:\n    pass\n")
    tree.write("megatron.core.utils", "def get_pg_size(group):\n    return 1\n")
    for name in ("dsa_indexer_loss", "dsa_layout", "dsa_masking"):
        tree.write(f"{EAV}.{name}", "")
    for name in KERNELS:
        tree.write(name, (kernels or {}).get(name) or upstream_text(module=name))
    return tree.write(DSA, upstream_text() if text is None else text).use().imported(DSA)


class RecordingKernel:
    """Stands for SparseMLA: keeps the arguments, and returns the first 512 channels of q in the kernel's shapes."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]] = []

    def apply(
        self, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append((q, kv, indices, scale))
        return q[..., :512] * 1, q[..., 0].float()


class DenseKernel:
    """Stands for SparseMLA with its arithmetic in float64 and its masking: ids of -1 only, clamped at 0 from below."""

    @staticmethod
    def apply(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        b, _, h, width = q.shape
        assert (width, kv.shape[2:], indices.size(-1) % 64) == (576, (1, 576), 0)
        assert h >= 16
        assert h & (h - 1) == 0
        assert indices.dtype is torch.int32
        assert indices.max() < kv.size(1), "the kernel reads out of bounds there"
        if scale is None:
            scale = width**-0.5
        keys = kv[:, :, 0].double()
        gathered = torch.stack([keys[i][indices[i, :, 0].clamp(min=0).long()] for i in range(b)])
        scores = torch.einsum("bshd,bskd->bshk", q.double(), gathered) * scale
        scores = scores.masked_fill((indices[:, :, 0] == -1)[:, :, None], float("-inf"))
        top = scores.amax(-1, keepdim=True).clamp(min=-1e300)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        weights = weights / total.clamp(min=1e-300)
        out = torch.einsum("bshk,bskd->bshd", weights, gathered[..., :512])
        return out.to(q.dtype), total.log().squeeze(-1).float()


def dense(query, key, topk_indices, scale):
    """What the function means, in float64 over all keys at once: [sq, b, h, 512]. Differentiable."""
    skv = key.size(0)
    q, k = query.double(), key[:, :, 0].double()
    counts = torch.zeros((*topk_indices.shape[:2], skv), dtype=torch.float64)
    valid = (topk_indices >= 0) & (topk_indices < skv)
    counts.scatter_add_(-1, topk_indices.clamp(0, skv - 1).long(), valid.double())
    scores = torch.einsum("sbhd,kbd->bhsk", q, k) * scale
    scores = scores.masked_fill(counts[:, None] == 0, float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp(min=-1e300).detach()
    weights = torch.exp(scores - top) * counts[:, None]
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.einsum("bhsk,kbd->sbhd", weights, k[..., :512])
