"""The whole layer in one process: against transformers, document by document, and where gradients may flow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from torch import Tensor

from mcore_patches.attention.common.layout import packed_layout
from mcore_patches.attention.qsa import attention, freeze_backbone, inject_routes, record_routes
from mcore_patches.attention.qsa.loss import training_loss
from mcore_patches.attention.qsa.rope import rotations
from mcore_patches.ops.indexer_kl import indexer_kl
from tests.attention.tiny import (
    RATIO,
    RECOMPUTE,
    Reference,
    attended_tokens,
    grads_of,
    packed_params,
    qsa_config,
    qsa_layer,
    relative_error,
    rotary_table,
    run_layer,
)
from tests.ops.qsa_helpers import lengths_id, no_host_reads

pytestmark = pytest.mark.usefixtures("megatron")

LAYOUTS = [[13, 50, 33], [1, 3, 4, 41, 7, 40], [64, 32], [5] * 6, [96]]


def _scores(layer: Any, hidden: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Block scores of each row, computed row by row in float64 from the layer's own fp32 index queries and keys."""
    with torch.no_grad():
        layout = packed_layout(packed_params(lengths), hidden.shape[0], RATIO, layer.pg_collection.cp)
        rotation = rotations(rotary_table(max(lengths), packed=True), layout, 1.0)
        q_idx, k_blocks = layer._index(hidden, layout, rotation)
    scores = torch.einsum("thd,bd->thb", q_idx.double(), k_blocks.double()).relu().sum(1)
    starts, positions = layout.rows.block_start.tolist(), layout.rows.pos.tolist()
    return [scores[t, start : start + (pos + 1) // RATIO] for t, (start, pos) in enumerate(zip(starts, positions))]


@pytest.mark.parametrize("lengths", LAYOUTS, ids=lengths_id)
def test_selection_is_that_of_transformers(lengths: list[int]) -> None:
    config = qsa_config()
    layer = qsa_layer(config)
    hidden = torch.randn(sum(lengths), 1, config.hidden_size)
    with torch.no_grad(), record_routes(layer) as routes:
        run_layer(layer, hidden, lengths)
    theirs = Reference(layer, config).selection(hidden, lengths)[0]
    _assert_selects_as(theirs, routes[1][0], layer, hidden, lengths)


@pytest.mark.parametrize(("seq", "batch"), [(37, 3), (96, 2), (3, 2)], ids=lambda size: str(size))
def test_selection_of_batches_is_that_of_transformers(seq: int, batch: int) -> None:
    config = qsa_config()
    layer = qsa_layer(config)
    hidden = torch.randn(seq, batch, config.hidden_size)
    with torch.no_grad(), record_routes(layer) as routes:
        run_layer(layer, hidden)
    theirs = torch.block_diag(*Reference(layer, config).selection(hidden, None)).bool()
    rows = hidden.transpose(0, 1).reshape(seq * batch, 1, -1)
    _assert_selects_as(theirs, routes[1][0], layer, rows, [seq] * batch)


def _assert_selects_as(theirs: Tensor, ids: Tensor, layer: Any, hidden: Tensor, lengths: Sequence[int]) -> None:
    """Rows attend the tokens of `theirs`, bool [T, T], but for at most two that tie at the cut."""
    attended = attended_tokens(ids, lengths, RATIO)
    differing = (attended != theirs).any(dim=1).nonzero().flatten().tolist()
    scores = _scores(layer, hidden, lengths)
    for row in differing:
        # Ties, which torch.topk orders as it likes, are the only excuse: every block chosen by one side only has the
        # score of the cut within 4 ulp of fp32.
        mine = {b for b in ids[row].tolist() if b >= 0}
        start = row - int(_position(row, lengths))
        chosen = {b for b in range(len(scores[row])) if theirs[row, start + b * RATIO]}
        cut = scores[row].sort(descending=True).values[len(mine) - 1].float()
        ulp = (torch.nextafter(cut, torch.tensor(float("inf"))) - cut).item()
        for block in mine ^ chosen:
            assert abs(scores[row][block].item() - cut.item()) <= 4 * ulp, (row, block)
    assert len(differing) <= 2, f"{len(differing)} rows tie at the cut"


def _position(row: int, lengths: Sequence[int]) -> int:
    for length in lengths:
        if row < length:
            return row
        row -= length
    raise IndexError(row)


@pytest.mark.parametrize(
    ("lengths", "kv_heads"),
    [*((lengths, 2) for lengths in LAYOUTS), ([13, 20], 1), ([13, 20], 4), (None, 2)],
    ids=lambda x: f"Hkv{x}" if isinstance(x, int) else "B2-S37" if x is None else lengths_id(x),
)
def test_outputs_and_gradients_are_those_of_transformers(lengths: list[int] | None, kv_heads: int) -> None:
    config = qsa_config(num_query_groups=kv_heads, qsa_indexer_n_heads=8)
    layer = qsa_layer(config)
    shape = (37, 2) if lengths is None else (sum(lengths), 1)
    hidden = torch.randn(*shape, config.hidden_size, requires_grad=True)
    theirs = hidden.detach().clone().requires_grad_()
    reference = Reference(layer, config)

    out = run_layer(layer, hidden, lengths)
    expected = reference.forward(theirs, lengths)
    assert relative_error(expected, out) < 1e-6
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()

    assert relative_error(theirs.grad, hidden.grad) < 2e-6
    gradients = reference.gradients(config)
    for name, grad in grads_of(layer).items():
        # transformers has no indexer loss; ours is looked at elsewhere.
        if not name.startswith("indexer."):
            assert relative_error(gradients[name], grad) < 2e-6, name


def test_bfloat16_rounds_where_transformers_does() -> None:
    config = qsa_config("bf16", qsa_indexer_n_heads=8)
    layer = qsa_layer(config).eval()
    hidden = torch.randn(96, 1, config.hidden_size).bfloat16()
    reference = Reference(layer, config)
    with torch.no_grad(), record_routes(layer) as routes:
        out = run_layer(layer, hidden, [13, 50, 33])
    attended = attended_tokens(routes[1][0], [13, 50, 33], RATIO)
    same = (attended == reference.selection(hidden, [13, 50, 33])[0]).all(dim=1)
    # bf16 products tie often, and torch.topk orders ties as it likes.
    assert same.float().mean() > 0.95
    with torch.no_grad():
        expected = reference.forward(hidden, [13, 50, 33])
    assert relative_error(expected[same], out[same]) < 1e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.03), ("fp16", 0.004)], ids=["bf16", "fp16"])
def test_half_precision_gradients_follow_those_of_fp32(dtype: str, tolerance: float) -> None:
    """With the routes of the fp32 layer, as rounding would choose others."""
    half = {"dtype": "bf16"} if dtype == "bf16" else {"fp16": True, "params_dtype": torch.float16}
    layer, rounded = qsa_layer(qsa_config()), qsa_layer(qsa_config(**half))
    hidden = torch.randn(96, 1, 64)
    with record_routes(layer) as routes:
        out = run_layer(layer, hidden, [13, 50, 33])
    with inject_routes(rounded, routes):
        half_out = run_layer(rounded, hidden.to(rounded.config.params_dtype), [13, 50, 33])
    assert half_out.dtype is rounded.config.params_dtype
    out.square().mean().backward()
    half_out.float().square().mean().backward()
    for name, grad in grads_of(layer).items():
        bound = tolerance * (5 if name.startswith("indexer.") else 1)
        assert relative_error(grad, rounded.get_parameter(name).grad) < bound, name


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_packed_documents_equal_separate_ones(stage: str) -> None:
    lengths = [13, 1, 3, 50, 4, 33]
    config = qsa_config(qsa_stage=stage, qsa_indexer_loss_reduction="sum")
    layer = _trainable(qsa_layer(config), stage)
    hidden = torch.randn(sum(lengths), 1, config.hidden_size)
    whole = run_layer(layer, hidden, lengths)
    weight = torch.randn_like(whole)
    (whole * weight).sum().backward()
    packed = {name: grad.clone() for name, grad in grads_of(layer).items() if grad is not None}
    layer.zero_grad()
    row = 0
    for length in lengths:
        one = slice(row, row + length)
        out = run_layer(layer, hidden[one])
        assert relative_error(whole[one], out) < 1e-6, length
        (out * weight[one]).sum().backward()
        row += length
    assert packed.keys() == {name for name, grad in grads_of(layer).items() if grad is not None}
    for name, grad in packed.items():
        assert relative_error(grad, layer.get_parameter(name).grad) < 3e-6, name


@pytest.mark.parametrize("padding", ["between", "after"])
def test_padding_changes_nothing(padding: str) -> None:
    """Padding inside a document's room, or after the last document, is not attended, not selected and not counted."""
    lengths, room = [13, 6, 33], [16, 8, 40]
    config = qsa_config()
    layer = qsa_layer(config)
    hidden = torch.randn(sum(lengths), 1, config.hidden_size)
    plain = run_layer(layer, hidden, lengths)
    weight = torch.randn_like(plain)
    (plain * weight).sum().backward()
    expected = {name: grad.clone() for name, grad in grads_of(layer).items()}
    layer.zero_grad()

    if padding == "between":
        packed, places, total = packed_params(lengths, room), [0, 16, 24], sum(room)
    else:
        packed, places, total = packed_params(lengths), [0, 13, 19], sum(lengths) + 11
    real = torch.cat([torch.arange(at, at + n) for at, n in zip(places, lengths)])
    padded = torch.full((total, 1, config.hidden_size), 1e3)
    padded[real] = hidden
    out, _ = layer(padded, None, rotary_pos_emb=rotary_table(40, packed=True), packed_seq_params=packed)
    (out[real] * weight).sum().backward()
    assert relative_error(plain, out[real]) < 1e-6
    rest = torch.ones(total, dtype=torch.bool)
    rest[real] = False
    assert (out[rest] == 0).all()
    for name, grad in grads_of(layer).items():
        assert relative_error(expected[name], grad) < 3e-6, name


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_no_loss_crosses_over(recompute: str) -> None:
    """Stage "sparse": the main loss gives the indexer no gradient, the indexer's loss none to anything else."""
    config = qsa_config(**RECOMPUTE[recompute])
    hidden = torch.randn(40, 2, config.hidden_size)

    def gradients(main: float, indexer: float) -> dict[str, Tensor | None]:
        layer = qsa_layer(config)
        layer.loss_scale.value = torch.tensor(indexer)
        x = hidden.clone().requires_grad_()
        out = tensor_parallel.checkpoint(partial(run_layer, layer), False, x) if recompute == "full" else None
        out = run_layer(layer, x) if out is None else out
        (out.square().sum() * main).backward()
        return grads_of(layer) | {"input": x.grad}

    def zero(grad: Tensor | None) -> bool:
        return grad is None or not grad.any()

    both, main, indexer = gradients(1.0, 1.0), gradients(1.0, 0.0), gradients(0.0, 1.0)
    for name in both:
        if name.startswith("indexer."):
            assert zero(main[name]), name
            assert indexer[name].abs().max() > 0, name
            assert torch.equal(both[name], indexer[name]), name
        else:
            assert zero(indexer[name]), name
            assert main[name].abs().max() > 0, name
            assert torch.equal(both[name], main[name]), name


def test_frozen_indexer_gets_no_gradient() -> None:
    layer = qsa_layer(qsa_config(qsa_stage="frozen"))
    run_layer(layer, torch.randn(40, 2, 64, requires_grad=True)).square().sum().backward()
    for name, grad in grads_of(layer).items():
        if name.startswith("indexer."):
            assert grad is None, name
        else:
            assert grad.abs().max() > 0, name


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_gradient_of_index_scores_is_student_less_teacher(
    stage: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dL/dI = coefficient (softmax(I) - t) / N on the support, t made of the layer's own attention, row by row."""
    lengths, room = [13, 6, 33], [16, 8, 40]
    config = qsa_config(
        qsa_stage=stage, qsa_indexer_n_heads=1, qsa_indexer_loss_coeff=0.3, qsa_indexer_loss_reduction=reduction
    )
    layer = _trainable(qsa_layer(config).double(), stage)
    seen: list[tuple[Any, ...]] = []

    def keep(*args: Any, **kwargs: Any) -> Tensor:
        args[0].retain_grad()
        seen.append(args)
        return indexer_kl(*args, **kwargs)

    monkeypatch.setattr(attention.indexer_kl, "indexer_kl", keep)
    hidden, table = torch.randn(64, 1, 64, dtype=torch.float64), rotary_table(40, packed=True).double()
    layer(hidden, None, rotary_pos_emb=table, packed_seq_params=packed_params(lengths, room))[0].mul(0).sum().backward()
    ((q_idx, k_blocks, q, k, _, ids, pos, start, block_start),) = seen
    number = sum(lengths) if reduction == "mean" else 1
    q_idx, k_blocks = q_idx.detach(), k_blocks.detach()
    for row in range(64):
        first_block, count = int(block_start[row]), (int(pos[row]) + 1) // RATIO
        support = list(range(count)) if ids is None else [b for b in ids[row].tolist() if b >= 0]
        expected = torch.zeros(16, dtype=torch.float64)
        if support:
            tokens = [*range(count * RATIO, int(pos[row]) + 1), *(b * RATIO + j for b in support for j in range(RATIO))]
            keys = k[int(start[row]) + torch.tensor(tokens)].repeat_interleave(2, dim=1)
            mass = torch.einsum("hd,thd->ht", q[row], keys).mul(16**-0.5).softmax(dim=1).sum(dim=0)
            teacher = mass[-len(support) * RATIO :].view(-1, RATIO).amax(dim=1)
            products = k_blocks[first_block + torch.tensor(support)]
            scores = (products @ q_idx[row, 0]).relu() * 16**-0.5
            slope = 0.3 / number * (scores.softmax(dim=0) - teacher / teacher.sum()) * (scores > 0)
            expected = 16**-0.5 * slope @ products
        torch.testing.assert_close(seen[0][0].grad[row, 0], expected, rtol=1e-9, atol=1e-14)


def test_loss_reaches_below_when_asked_to() -> None:
    config = qsa_config(qsa_indexer_detach_input=False)
    layer = qsa_layer(config)
    x = torch.randn(40, 2, config.hidden_size, requires_grad=True)
    run_layer(layer, x).mul(0.0).sum().backward()
    assert x.grad.abs().max() > 0
    assert not layer.linear_qkv.weight.grad.any()


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("detach", [True, False], ids=["detached", "attached"])
def test_indexer_gradient_against_finite_differences(stage: str, detach: bool) -> None:
    """In float64, through projection, pooling, norms and rotation, with the attention's probabilities held still."""
    config = qsa_config(qsa_stage=stage, qsa_indexer_detach_input=detach)
    layer = _trainable(qsa_layer(config).double(), stage)
    hidden = torch.randn(21, 1, config.hidden_size, dtype=torch.float64)
    losses: list[Tensor] = []

    def keep(kl_sum: Tensor, *rest: Any) -> Tensor:
        losses.append(training_loss(kl_sum, *rest))
        return losses[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "training_loss", keep)
        run_layer(layer, hidden, [9, 12]).mul(0.0).sum().backward()
        for name, parameter in layer.indexer.named_parameters():
            direction = torch.randn_like(parameter)
            step = 1e-6
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                plus = _loss_at(layer, hidden, losses)
                parameter.add_(direction, alpha=-2 * step)
                minus = _loss_at(layer, hidden, losses)
                parameter.add_(direction, alpha=step)
            slope = (plus - minus) / (2 * step)
            assert slope == pytest.approx((parameter.grad * direction).sum().item(), rel=1e-5, abs=1e-9), name


def _loss_at(layer: Any, hidden: Tensor, losses: list[Tensor]) -> float:
    with torch.enable_grad():
        run_layer(layer, hidden, [9, 12])
    return losses[-1].item()


def _trainable(layer: Any, stage: str) -> Any:
    if stage == "warmup":
        freeze_backbone(layer)
    return layer


def test_own_block_is_not_forced() -> None:
    """At the last token of a block there is no tail; the token is attended only if its block wins a place."""
    config = qsa_config()
    layer = qsa_layer(config)
    hidden = torch.randn(96, 1, config.hidden_size)
    with torch.no_grad(), record_routes(layer) as routes:
        run_layer(layer, hidden, [96])
    attended = attended_tokens(routes[1][0], [96], RATIO)
    ends = torch.arange(RATIO - 1, 96, RATIO)
    own = attended[ends, ends]
    assert own[:2].all(), "the first two blocks are all there is to select"
    assert not own.all()


REAL = {"qsa_indexer_budget": 2048, "qsa_indexer_n_heads": 16, "qsa_indexer_head_dim": 8}


@pytest.mark.parametrize("length", range(2047, 2057))
def test_rows_are_dense_up_to_the_budget_at_the_real_sizes(length: int) -> None:
    """Budget 2048, blocks of 4: row i is dense causal up to i = 2050, and holds 2048 to 2051 tokens from then on."""
    config = qsa_config(**REAL)
    layer = qsa_layer(config).eval()
    hidden = torch.randn(length, 1, config.hidden_size)
    with torch.no_grad(), record_routes(layer) as routes:
        run_layer(layer, hidden, [length])
    ids = routes[1][0]
    positions = torch.arange(length)
    blocks = (positions + 1) // RATIO
    every = torch.arange(ids.shape[1]).expand(length, -1)
    assert torch.equal(ids[:2051].long(), every.where(every < blocks[:, None], -1)[:2051])
    scores = _scores(layer, hidden, [length])
    for row in range(2051, length):
        # By score, then by id: the one block of the 513 or 514 that the sort puts last, or two, is left out.
        best = scores[row].argsort(descending=True, stable=True)[:512]
        assert ids[row].tolist() == best.sort().values.tolist()
    attended = (ids >= 0).sum(dim=1) * RATIO + (positions + 1) % RATIO
    assert torch.equal(attended[:2051], positions[:2051] + 1)
    assert attended[2051:].tolist() == [2048 + (i + 1) % RATIO for i in range(2051, length)]


def test_selection_is_that_of_transformers_at_the_real_sizes() -> None:
    """All rows of the longest of these documents; those of a shorter one are the same, attention being causal."""
    config = qsa_config(**REAL)
    layer = qsa_layer(config).eval()
    hidden = torch.randn(2056, 1, config.hidden_size)
    with torch.no_grad(), record_routes(layer) as routes:
        run_layer(layer, hidden, [2056])
    theirs = Reference(layer, config).selection(hidden, [2056])[0]
    assert theirs[2051:].sum(dim=1).tolist() == [2048, 2049, 2050, 2051, 2048]
    _assert_selects_as(theirs, routes[1][0], layer, hidden, [2056])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_tiny_documents(length: int) -> None:
    config = qsa_config()
    layer = qsa_layer(config)
    hidden = torch.randn(length, 1, config.hidden_size, requires_grad=True)
    reference = Reference(layer, config)
    out = run_layer(layer, hidden, [length])
    assert relative_error(reference.forward(hidden.detach(), [length]), out) < 1e-6
    out.sum().backward()
    for name, grad in grads_of(layer).items():
        assert grad is None or grad.isfinite().all(), name


def test_evaluation_trains_nothing_and_saves_nothing() -> None:
    DSAIndexerLossLoggingHelper.tracker.clear()
    layer = qsa_layer(qsa_config()).eval()
    x = torch.randn(40, 1, 64, requires_grad=True)
    run_layer(layer, x).sum().backward()
    assert all(p.grad is None for p in layer.indexer.parameters())
    assert len(layer.routes) == 0
    assert not DSAIndexerLossLoggingHelper.tracker


def test_forward_and_backward_never_wait_for_the_device() -> None:
    layer = qsa_layer(qsa_config())
    x = torch.randn(48, 1, 64, requires_grad=True)
    run_layer(layer, x, [13, 35])  # warm caches
    table, packed = rotary_table(35, packed=True), packed_params([13, 35])
    with no_host_reads():
        layer(x, None, rotary_pos_emb=table, packed_seq_params=packed)[0].sum().backward()


def test_multimodal_rotary_tables_differ_by_sequence() -> None:
    """A table [S, B, 1, channels] has angles of its own for each sequence; in packed documents, for each token."""
    layer = qsa_layer(qsa_config(mrope_section=[2, 1, 1])).eval()
    hidden = torch.randn(24, 2, 64)
    tables = [rotary_table(24), 3 * rotary_table(24)]
    with torch.no_grad():
        both, _ = layer(hidden, None, rotary_pos_emb=torch.cat(tables, dim=1))
        for b, table in enumerate(tables):
            one, _ = layer(hidden[:, b : b + 1], None, rotary_pos_emb=table)
            assert relative_error(one, both[:, b : b + 1]) < 1e-6
        packed, _ = layer(
            hidden.transpose(0, 1).reshape(48, 1, 64),
            None,
            rotary_pos_emb=torch.cat(tables),
            packed_seq_params=packed_params([24, 24]),
        )
    assert relative_error(both.transpose(0, 1).reshape(48, 1, 64), packed) < 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30], ids=str)
@pytest.mark.parametrize("stage", ["sparse", "frozen", "warmup"])
@pytest.mark.parametrize("place", ["index_qk_proj", "q_layernorm", "k_layernorm"])
def test_index_scores_that_are_not_finite_are_an_error(place: str, stage: str, value: float) -> None:
    """They would choose blocks by the bits of a NaN while the output looks well."""
    layer = _trainable(qsa_layer(qsa_config(qsa_stage=stage)), stage)
    hidden = torch.randn(40, 1, 64)
    run_layer(layer, hidden)
    with torch.no_grad():
        weight = layer.get_parameter(f"indexer.{place}.weight")
        if place == "index_qk_proj":  # a norm would bring a large one back
            value = float("nan") if value == 1e30 else value
        weight.view(-1)[3] = value
        if value == 1e30:
            layer.indexer.q_layernorm.weight.fill_(1e30)
            layer.indexer.k_layernorm.weight.fill_(1e30)
    with pytest.raises(RuntimeError, match="QSA layer 1: index queries or keys are not finite"):
        run_layer(layer, hidden)


def test_padding_may_hold_nan() -> None:
    """Neither its index queries nor a block that no row looks at say anything of the rest."""
    layer, packed = qsa_layer(qsa_config()).eval(), packed_params([9], [12])
    hidden = torch.randn(12, 1, 64)
    hidden[9:] = float("nan")
    with torch.no_grad():
        out, _ = layer(hidden, None, rotary_pos_emb=rotary_table(12, packed=True), packed_seq_params=packed)
    assert out[:9].isfinite().all()


def _causal_mask(seq: int, batch: int = 1) -> Tensor:
    return ~torch.ones(seq, seq, dtype=torch.bool).tril().expand(batch, 1, -1, -1)


@pytest.mark.parametrize("batch", [1, 2])
def test_causal_mask_changes_nothing(batch: int) -> None:
    layer, hidden = qsa_layer(qsa_config()), torch.randn(13, 2, 64)
    with no_host_reads():
        out, _ = layer(hidden, _causal_mask(13, batch), rotary_pos_emb=rotary_table(13))
    assert torch.equal(out, run_layer(layer, hidden))


@pytest.mark.parametrize(
    ("rows", "columns", "hidden"),
    [
        (slice(None), slice(10, None), True),
        (slice(None), slice(0, 2), True),
        (slice(6, None), slice(0, 6), True),
        (slice(10, None), slice(None), True),
        (slice(0, 4), slice(0, 4), False),
        (slice(7, 8), slice(3, 4), True),
        (slice(None), slice(None), False),
    ],
    ids=["right padding", "left padding", "documents", "padded queries", "prefix", "one place", "all visible"],
)
def test_other_masks_are_refused(rows: slice, columns: slice, hidden: bool) -> None:
    layer = qsa_layer(qsa_config())
    mask = _causal_mask(13, 2).clone()
    mask[1, 0, rows, columns] = hidden
    with pytest.raises(RuntimeError, match="attention_mask is not the causal one: the layer is causal over whole"):
        layer(torch.randn(13, 2, 64), mask, rotary_pos_emb=rotary_table(13))


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 13, dtype=torch.bool), torch.zeros(1, 1, 13, 13), _causal_mask(14), _causal_mask(13, 3)],
    ids=["tokens", "float", "longer", "batch"],
)
def test_masks_of_other_shapes_are_refused(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be bool \(1, 1, 13, 13\) or \(2, 1, 13, 13\): the layer is causal"):
        qsa_layer(qsa_config())(torch.randn(13, 2, 64), mask, rotary_pos_emb=rotary_table(13))
