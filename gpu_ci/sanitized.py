"""The kernels for this GPU on small shapes, forward and backward, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m gpu_ci.sanitized [--shared-kib KIB] [OP]...

OP: sparse_gqa, select_blocks, indexer_kl, sparse_mla; all of them if none is named. KIB: as if a block could have only
so much shared memory: the kernels that other GPUs than Hopper take.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib

import torch
from torch import Tensor

from mcore_patches.ops.block_topk import select_blocks
from mcore_patches.ops.device import Device, describe
from mcore_patches.ops.indexer_kl import indexer_kl
from mcore_patches.ops.sparse_gqa import sparse_gqa
from mcore_patches.ops.sparse_mla import sparse_mla

RATIO, TOPK = 4, 16
LENGTHS = (150, 3, 89)
LONG = (901, 90)  # where rows that select `MANY` blocks share too few, and take more than one step of 64 keys
MANY = 17


def normal(*size: int, device: str = "cuda") -> Tensor:
    return torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_()


class Documents:
    """Packed documents of odd lengths: where rows stand, and index queries and keys."""

    def __init__(self, device: str = "cuda", lengths: tuple[int, ...] = LENGTHS) -> None:
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
        blocks = torch.tensor([0, *(n // RATIO for n in lengths)]).cumsum(0)
        self.tokens, self.longest = sum(lengths), max(lengths)
        self.pos = torch.cat([torch.arange(n) for n in lengths]).int().to(device)
        self.start, self.block_start = (
            torch.repeat_interleave(torch.tensor(first), torch.tensor(lengths)).int().to(device)
            for first in (starts, blocks[:-1].tolist())
        )
        self.q_idx = normal(self.tokens, 4, 64, device=device)
        self.k_blocks = normal(int(blocks[-1]), 64, device=device)

    def scattered_ids(self, count: int = MANY) -> Tensor:
        """Blocks of its own for every row: a tile's union passes what is shared, so rows are taken one by one."""
        complete = torch.div(self.pos + 1, RATIO, rounding_mode="floor")[:, None]
        score = torch.rand(self.tokens, self.longest // RATIO, device=self.pos.device)
        hidden = torch.arange(score.shape[1], device=self.pos.device) >= complete
        best, ids = score.masked_fill_(hidden, -1.0).topk(count, dim=1)
        return ids.masked_fill_(best < 0, -1).int()

    def ids(self) -> Tensor:
        return select_blocks(
            self.q_idx, self.k_blocks, self.pos, self.block_start, ratio=RATIO, topk=TOPK, backend="tilelang"
        )


def run_select_blocks() -> None:
    Documents().ids()


def run_sparse_gqa() -> None:
    short, long = Documents(), Documents(lengths=LONG)
    # Rows that share little with their neighbours take other kernels than rows that do.
    for documents, ids in ((short, short.ids()), (short, short.scattered_ids(2)), (long, long.scattered_ids())):
        q, k, v = (normal(documents.tokens, heads, 64) for heads in (8, 2, 2))
        with torch.no_grad():  # so that scores rise along a row
            k *= 1 + documents.pos[:, None, None] / 20
        out, _ = sparse_gqa(
            q, k, v, ids, documents.pos, documents.start, scale=0.125, block_size=RATIO, backend="tilelang"
        )
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


def run_indexer_kl() -> None:
    documents = Documents()
    q, k = normal(documents.tokens, 8, 64).detach(), normal(documents.tokens, 2, 64).detach()
    lse = torch.full((documents.tokens, 8), 3.0, device="cuda")
    # More index heads than 8 take other kernels over selected blocks.
    for q_idx in (documents.q_idx, normal(documents.tokens, 9, 64)):
        for ids in (documents.ids(), None):
            rows = ids, documents.pos, documents.start, documents.block_start
            loss = indexer_kl(q_idx, documents.k_blocks, q, k, lse, *rows, scale=0.125, ratio=RATIO, backend="tilelang")
            torch.autograd.grad(loss, (q_idx, documents.k_blocks))


def run_sparse_mla() -> None:
    # Each backward kernel; then two batch entries, two blocks of heads, strided queries, less than a block of ids.
    for batch, rows, heads, topk in ((1, 37, 8, 70), (1, 37, 24, 70), (1, 37, 64, 70), (2, 9, 65, 3)):
        for width in (512, 576):
            q, kv = normal(rows, batch, heads, width).transpose(0, 1), normal(batch, 53, 1, width)
            ids = torch.randint(-1, 54, (batch, rows, topk), device="cuda", dtype=torch.int32)
            for deterministic in (False, True):
                out, _ = sparse_mla(q, kv, ids, scale=0.05, deterministic=deterministic, backend="tilelang")
                torch.autograd.grad(out, (q, kv), torch.randn_like(out))


OPS = {
    "sparse_gqa": run_sparse_gqa,
    "select_blocks": run_select_blocks,
    "indexer_kl": run_indexer_kl,
    "sparse_mla": run_sparse_mla,
}


def pretend(device: Device) -> None:
    """From here on every op chooses its kernels for `device`."""
    package = "mcore_patches.ops"
    for name in ("block_topk", "indexer_kl", "sparse_gqa"):
        importlib.import_module(f"{package}.{name}.tilelang_backend").device_of = lambda _: device
    importlib.import_module(f"{package}.sparse_mla.tilelang_kernels")._device = lambda _: device


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shared-kib", type=int)
    parser.add_argument("ops", nargs="*", metavar="OP", help=", ".join(OPS))
    options = parser.parse_args()
    if unknown := set(options.ops) - set(OPS):
        parser.error(f"OP must be {', '.join(OPS)}, got {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        raise SystemExit("gpu_ci.sanitized needs a CUDA device")
    if options.shared_kib is not None:
        whole = describe(torch.device("cuda", torch.cuda.current_device()))
        pretend(dataclasses.replace(whole, shared_bytes=options.shared_kib * 1024))
    for name in options.ops or OPS:
        OPS[name]()
        torch.cuda.synchronize()
        print(f"{name} ran")


if __name__ == "__main__":
    main()
