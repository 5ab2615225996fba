"""The oracle: one row after the other, straight from the definition. Autograd differentiates the student."""

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_patches.ops.workspace import accumulation_dtype


def indexer_kl_naive(
    q_idx: Tensor,
    k_blocks: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    block_ids: Tensor | None,
    row_pos: Tensor,
    row_start: Tensor,
    row_block_start: Tensor,
    *,
    scale: float,
    index_scale: float,
    ratio: int,
    weights: Tensor | None,
    relu: bool,
    valid: Tensor | None,
    reduction: str,
    tp_group: dist.ProcessGroup | None,
) -> Tensor:
    """Arguments and result as in `indexer_kl`; a Python loop over rows that reads positions and ids on the host
    and always refuses NaN."""
    dtype = accumulation_dtype(q.dtype, q_idx.dtype)
    result_dtype = accumulation_dtype(q_idx.dtype)
    # Converted once, so that autograd sums the rows' gradients before it rounds them.
    q_idx, k_blocks = q_idx.to(dtype), k_blocks.to(dtype)
    weights = None if weights is None else weights.to(dtype)
    valid_rows = [True] * len(row_pos) if valid is None else valid.tolist()
    total = q_idx.new_zeros((), dtype=dtype)
    counted = 0
    placement = zip(row_pos.tolist(), row_start.tolist(), row_block_start.tolist(), valid_rows)
    with torch.autocast(q.device.type, enabled=False):
        for row, (pos, start, block_start, is_valid) in enumerate(placement):
            if pos < 0:
                continue
            complete = (pos + 1) // ratio
            blocks = list(range(complete))
            if block_ids is not None:
                blocks = [b for b in block_ids[row].tolist() if 0 <= b < complete]
            tail = range(complete * ratio, pos + 1)
            tokens = [start + b * ratio + t for b in blocks for t in range(ratio)] + [start + t for t in tail]

            with torch.no_grad():
                mass = _attention_mass(q[row].to(dtype), k[tokens].to(dtype), scale, None if lse is None else lse[row])
                if tp_group is not None:
                    dist.all_reduce(mass, group=tp_group)
            if not is_valid:
                continue
            counted += 1
            if not blocks:
                continue
            block_mass = mass[: len(blocks) * ratio].view(len(blocks), ratio).amax(dim=1)
            if block_mass.sum() == 0:
                continue
            teacher = block_mass / block_mass.sum()

            products = q_idx[row] @ k_blocks[[block_start + b for b in blocks]].T
            if relu:
                products = products.relu()
            if weights is not None:
                products = products * weights[row, :, None]
            log_student = (index_scale * products.sum(dim=0)).log_softmax(dim=0)
            divergence = (torch.xlogy(teacher, teacher) - teacher * log_student).sum()
            if divergence.isnan():
                what = "scores of visible blocks, attention scores and lse"
                raise ValueError(f"indexer_kl: {what} must not be NaN; row {row} has some")
            total = total + divergence
    loss = total / max(counted, 1) if reduction == "mean" else total
    return loss.to(result_dtype)


def _attention_mass(q: Tensor, k: Tensor, scale: float, lse: Tensor | None) -> Tensor:
    """Probability of each of the given keys [S, Hkv, D], summed over the query heads [Hq, D]: [S]."""
    keys = k.repeat_interleave(q.shape[0] // k.shape[1], dim=1)
    scores = torch.einsum("hd,shd->hs", q, keys) * scale
    denominator = scores.logsumexp(dim=1) if lse is None else lse.to(scores.dtype)
    return (scores - denominator[:, None]).exp().sum(dim=0)
