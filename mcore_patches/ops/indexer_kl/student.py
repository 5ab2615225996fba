"""The indexer's scores of chunks of rows, and the sums of their gradients."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from mcore_patches.ops.row_split import RowSplit, sum_over_ranks_
from mcore_patches.ops.workspace import accumulation_dtype


class Student:
    """I = index_scale * sum_h w_h act(q_h . k) of chunks of rows, and the gradients that flow back through it.

    Rows that do not count (padding, not valid) enter with zeros: they may hold anything, NaN included.
    """

    def __init__(
        self,
        q_idx: Tensor,
        k_blocks: Tensor,
        weights: Tensor | None,
        counted: Tensor,
        index_scale: float,
        relu: bool,
        needs_grad: tuple[bool, bool, bool],
    ) -> None:
        self.dtype = accumulation_dtype(q_idx.dtype)
        self.counted = counted
        self.heads, self.channels = q_idx.shape[1:]
        self.num_blocks = k_blocks.shape[0]
        # The last row stays zero: it stands for blocks that a row does not see.
        self.blocks = pad(k_blocks.to(self.dtype), (0, 0, 0, 1))
        self.needs_grad = any(needs_grad)
        self._q_idx, self._weights, self._index_scale, self._relu = q_idx, weights, index_scale, relu
        self._dq, self._dk, self._dw = (
            torch.zeros(like.shape, dtype=self.dtype, device=like.device) if need and like is not None else None
            for need, like in zip(needs_grad, (q_idx, self.blocks, weights))
        )

    def queries(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """q_idx [R, H, d] and the head weights [R, H, 1] of a chunk."""
        ignored = ~self.counted[rows, None]
        queries = self._q_idx[rows].to(self.dtype).masked_fill(ignored[:, :, None], 0.0)
        if self._weights is None:
            return queries, None
        return queries, self._weights[rows].to(self.dtype).masked_fill(ignored, 0.0).unsqueeze(-1)

    def logits(self, activations: Tensor, head_weights: Tensor | None) -> Tensor:
        """I [R, B] from q . k [R, H, B], which becomes its activation in place."""
        if self._relu:
            activations.relu_()
        weighted = activations if head_weights is None else activations * head_weights
        return weighted.sum(dim=1).mul_(self._index_scale)

    def product_gradients(self, dlogits: Tensor, activations: Tensor, head_weights: Tensor | None) -> Tensor:
        """Gradient with respect to q . k: [R, H, B]. That of relu at 0 is 0."""
        grads = (dlogits * self._index_scale)[:, None].expand_as(activations)
        if head_weights is not None:
            grads = grads * head_weights
        return grads * (activations > 0) if self._relu else grads.contiguous()

    def add_query_gradients(self, rows: slice, grads: Tensor) -> None:
        if self._dq is not None:
            self._dq[rows] += grads

    def add_weight_gradients(self, rows: slice, dlogits: Tensor, activations: Tensor) -> None:
        if self._dw is not None:
            self._dw[rows] += (activations * dlogits[:, None]).sum(dim=-1).mul_(self._index_scale)

    @property
    def block_sums(self) -> Tensor | None:
        """Where the blocks' gradients are summed, spare row included; None where nobody wants them."""
        return self._dk

    def share_gradients(self, split: RowSplit) -> None:
        """Hand the gradients of this rank's rows to the others, and take theirs. A collective."""
        for grad in (self._dq, self._dw):
            if grad is not None:
                split.share_(grad[split.rows])

    def sum_block_gradients(self, group: dist.ProcessGroup | None) -> None:
        """Add up what the rows of all ranks give to the blocks. A collective."""
        if self._dk is not None:
            sum_over_ranks_(self._dk, group)

    def divide_gradients(self, number: Tensor) -> None:
        for grad in (self._dq, self._dk, self._dw):
            if grad is not None:
                grad.div_(number)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Those of q_idx, k_blocks and weights."""
        return self._dq, None if self._dk is None else self._dk[:-1], self._dw
