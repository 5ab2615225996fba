"""The oracle: sparse MLA as dense attention whose keys are weighted by how often a row selects them."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcore_patches.ops.workspace import accumulation_dtype


def sparse_mla_naive(q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, v_channels: int) -> tuple[Tensor, Tensor]:
    """Arguments and results as in `sparse_mla`, in O(B S H Skv) memory. Autograd differentiates it, twice if asked to.

    A NaN or infinity in a key that some row selects may reach every row of that batch entry, as in any dense attention;
    keys that no row selects are never read.
    """
    dtype = accumulation_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        counts = _selection_counts(indices, kv.shape[1]).to(dtype)
        selected = counts > 0
        # 0 * NaN is NaN: what no row selects has to leave before the products. The pad matches the counts' spare key.
        keys = pad(kv.squeeze(2), (0, 0, 0, 1)).to(dtype)
        keys = keys.masked_fill(~selected.any(dim=1).unsqueeze(-1), 0.0)

        scores = torch.einsum("bshd,bkd->bshk", q.to(dtype), keys) * scale
        scores = scores.masked_fill(~selected.unsqueeze(2), float("-inf"))
        largest = scores.detach().amax(dim=-1, keepdim=True)
        largest = largest.masked_fill(largest == float("-inf"), 0.0)
        weights = counts.unsqueeze(2) * torch.exp(scores - largest)
        total = weights.sum(dim=-1, keepdim=True)

        empty = total == 0.0
        probabilities = weights / total.masked_fill(empty, 1.0)
        out = torch.einsum("bshk,bkv->bshv", probabilities, keys[..., :v_channels])
        out = out.masked_fill(empty, 0.0)
        lse = (largest + total.log()).squeeze(-1).detach()
    return out.to(q.dtype), lse


def _selection_counts(indices: Tensor, num_keys: int) -> Tensor:
    """[B, S, Skv + 1]: how often each row selects each key, and 0 for a spare last key that catches all other ids."""
    ids = indices.long()
    ids = ids.masked_fill((ids < 0) | (ids >= num_keys), num_keys)
    counts = ids.new_zeros(*ids.shape[:2], num_keys + 1).scatter_add(2, ids, torch.ones_like(ids))
    counts[..., num_keys] = 0
    return counts
