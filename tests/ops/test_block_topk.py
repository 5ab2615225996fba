import itertools

import pytest
import torch
from torch import Tensor

from mcore_patches.ops.block_topk import resolve_backend, select_blocks, supports
from mcore_patches.ops.block_topk.chunked import BLOCK_TILE, ROW_TILE, select_blocks_chunked
from mcore_patches.ops.block_topk.naive import block_scores_naive
from mcore_patches.ops.packing import PackedRows, block_first_tokens
from tests.ops.assertions import assert_identical
from tests.ops.memory import peak_extra_bytes
from tests.ops.qsa_helpers import PACKED, TINY, lengths_id, no_host_reads, num_blocks_of, rows_of, strided

RATIOS = [1, 2, 4, 8, 16]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SCORING = {
    "relu": {},
    "relu-weights": {"weights": True},
    "linear": {"relu": False},
    "linear-weights": {"weights": True, "relu": False},
}


def inputs(
    rows: PackedRows, num_blocks: int, heads: int = 3, channels: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(len(rows.pos), heads, channels).to(dtype),
        torch.randn(num_blocks, channels).to(dtype),
    )


def brute_force(scores: Tensor, rows: PackedRows, ratio: int, topk: int) -> Tensor:
    """Sorts (-score, id) of every row; `scores` [Tq, Nb] are exact numbers."""
    expected = torch.full((len(rows.pos), topk), -1, dtype=torch.int32)
    for row, (pos, _, block_start) in enumerate(zip(*(field.tolist() for field in rows))):
        ranked = sorted((-float(scores[row, block_start + b]), b) for b in range((pos + 1) // ratio))
        chosen = sorted(b for _, b in ranked[:topk])
        expected[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return expected


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("lengths", [*PACKED, *TINY], ids=lengths_id)
def test_heavy_ties_are_cut_by_block_id(lengths, ratio, scoring, backend):
    """Small integers: every score is exact in every dtype and most are equal to others of the row."""
    rows = rows_of(lengths, ratio, padding=3)
    settings = dict(SCORING[scoring])
    q_idx = torch.randint(-1, 2, (len(rows.pos), 3, 4))
    k_blocks = torch.randint(-1, 2, (num_blocks_of(lengths, ratio), 4))
    products = torch.einsum("thd,bd->thb", q_idx, k_blocks)
    scores = products.clamp(min=0) if settings.get("relu", True) else products
    if settings.get("weights"):
        head_weights = torch.randint(-2, 3, (len(rows.pos), 3))
        scores = scores * head_weights[:, :, None]
        settings["weights"] = head_weights.float()
    expected = brute_force(scores.sum(dim=1), rows, ratio, topk=5)
    for dtype in FLOATS:
        got = select_blocks(
            q_idx.to(dtype),
            k_blocks.to(dtype),
            rows.pos,
            rows.block_start,
            ratio=ratio,
            topk=5,
            backend=backend,
            checked=True,
            **settings,
        )
        assert_identical(f"ids of {dtype}", expected, got)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_closed_form_scores_rank_blocks(backend):
    """One head, one channel, q = 1: the score of a block is its key."""
    keys = torch.tensor([3.0, -5.0, 3.0, 0.5, 7.0, -5.0, 0.0])
    rows = rows_of([14], 2)
    arguments = (torch.ones(14, 1, 1), keys[:, None], rows.pos, rows.block_start)
    got = select_blocks(*arguments, ratio=2, topk=3, relu=False, backend=backend)
    assert got[-1].tolist() == [0, 2, 4]
    assert got[0].tolist() == [-1, -1, -1]
    assert got[7].tolist() == [0, 2, 3]
    # relu makes all negative scores the tie 0, cut by id: block 1 beats block 5.
    assert select_blocks(*arguments, ratio=2, topk=5, backend=backend)[-1].tolist() == [0, 1, 2, 3, 4]
    negated = select_blocks(*arguments, ratio=2, topk=3, relu=False, weights=-torch.ones(14, 1), backend=backend)
    assert negated[-1].tolist() == [1, 5, 6]


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_of_both_signs_are_one_score(dtype, backend):
    rows = rows_of([8], 1)
    k_blocks = torch.tensor([0.0, -0.0, 0.0, -0.0, -1.0, -0.0, 0.0, 1.0], dtype=dtype)[:, None]
    q_idx = torch.ones(8, 1, 1, dtype=dtype)
    got = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=1, topk=3, relu=False, backend=backend)
    assert got[-1].tolist() == [0, 1, 7]
    got = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=1, topk=3, backend=backend)
    assert got[-1].tolist() == [0, 1, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinite_scores_are_scores(dtype):
    """A visible block scoring -inf is still taken before no block at all."""
    rows = rows_of([6], 1)
    k_blocks = torch.tensor([float("-inf"), 1.0, float("inf"), float("-inf"), 2.0, 0.0], dtype=dtype)[:, None]
    q_idx = torch.ones(6, 1, 1, dtype=dtype)
    expected = {2: [2, 4], 5: [0, 1, 2, 4, 5], 7: [0, 1, 2, 3, 4, 5, -1]}
    for topk, ids in expected.items():
        got = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=1, topk=topk, relu=False)
        assert got[-1].tolist() == ids
        naive = select_blocks(
            q_idx, k_blocks, rows.pos, rows.block_start, ratio=1, topk=topk, relu=False, backend="naive"
        )
        assert_identical("ids", naive, got)


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("lengths", PACKED, ids=lengths_id)
def test_chunked_equals_naive_in_float64(lengths, ratio, scoring):
    rows = rows_of(lengths, ratio, padding=3)
    q_idx, k_blocks = inputs(rows, num_blocks_of(lengths, ratio), dtype=torch.float64)
    settings = dict(SCORING[scoring])
    if settings.get("weights"):
        settings["weights"] = torch.randn(len(rows.pos), 3, dtype=torch.float64)
    got = {
        backend: select_blocks(
            q_idx, k_blocks, rows.pos, rows.block_start, ratio=ratio, topk=6, backend=backend, **settings
        )
        for backend in ("naive", "chunked")
    }
    assert_identical("ids", got["naive"], got["chunked"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", PACKED, ids=lengths_id)
def test_reduced_precision_differs_from_float64_only_at_the_cut(lengths, dtype):
    rows = rows_of(lengths, 1)
    q_idx, k_blocks = inputs(rows, sum(lengths), channels=64, dtype=dtype)
    got = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=1, topk=8)
    exact = block_scores_naive(q_idx.double(), k_blocks.double(), weights=None, relu=True)
    assert_differs_only_at_the_cut(exact, got, rows, ratio=1, topk=8, ulps=64)


def assert_differs_only_at_the_cut(
    scores: Tensor, ids: Tensor, rows: PackedRows, *, ratio: int, topk: int, ulps: int
) -> None:
    """Each row of `ids` is a top-k of the exact `scores`, up to blocks within `ulps` fp32 ulps of the k-th score."""
    expected = brute_force(scores, rows, ratio, topk)
    for row, block_start in enumerate(rows.block_start.tolist()):
        want, have = (set(x[row].tolist()) - {-1} for x in (expected, ids))
        assert len(want) == len(have), f"row {row} selects {len(have)} blocks, expected {len(want)}"
        if want == have:
            continue
        cut = min(float(scores[row, block_start + b]) for b in want)
        ulp = torch.finfo(torch.float32).eps * abs(cut)
        for b in want ^ have:
            distance = abs(float(scores[row, block_start + b]) - cut)
            assert distance <= ulps * ulp, f"row {row}, block {b}: {distance / ulp:.1f} ulps from the cut"


def hf_indexer(hidden_size: int, heads: int, channels: int, budget: int, ratio: int):
    """The indexer of the released model in transformers, with norm weights that are not 0, and its rotary embedding."""
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import (
        Qwen4ExpTextQSAIndexer,
        Qwen4ExpTextRotaryEmbedding,
    )

    config = Qwen4ExpTextConfig(
        hidden_size=hidden_size,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
        },
        indexer_n_heads=heads,
        indexer_kv_heads=1,
        indexer_head_dim=channels,
        indexer_budget=budget,
        indexer_compress_ratio=ratio,
    )
    config._attn_implementation = "sdpa"
    indexer = Qwen4ExpTextQSAIndexer(config, layer_idx=0)
    with torch.no_grad():
        for parameter in indexer.parameters():
            parameter.normal_(std=0.3)
    return indexer, Qwen4ExpTextRotaryEmbedding(config)


@pytest.mark.parametrize("lengths", PACKED, ids=lengths_id)
def test_selection_of_the_released_model(lengths):
    """Scoring and selection against transformers in fp32, on the q and block keys that its own modules make."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import apply_rotary_pos_emb

    heads, channels, ratio, topk, total = 4, 32, 4, 4, sum(lengths)
    indexer, rotary = hf_indexer(48, heads, channels, topk * ratio, ratio)
    hidden = torch.randn(1, total, 48)
    rows = rows_of(lengths, ratio)
    cos, sin = rotary(hidden, rows.pos[None].long())
    key = torch.arange(total)
    causal = (key >= rows.start[:, None]) & (key <= key[:, None])
    with torch.no_grad():
        theirs = indexer(hidden, (cos, sin), causal[None, None], None)[0, 0]

        q_raw, k_raw = indexer.index_qk_proj(hidden)[0].split([heads * channels, channels], dim=-1)
        q_idx = indexer.q_layernorm(q_raw.view(total, heads, channels))
        q_idx = apply_rotary_pos_emb(q_idx, cos=cos[0], sin=sin[0])
        boundaries = torch.tensor([0, *lengths]).cumsum(0)
        first = block_first_tokens(boundaries, total, ratio)[: num_blocks_of(lengths, ratio)].long()
        pooled = k_raw[first[:, None] + torch.arange(ratio)].mean(dim=1)
        k_blocks = apply_rotary_pos_emb(
            indexer.k_layernorm(pooled)[:, None], cos=cos[0, first], sin=sin[0, first]
        ).squeeze(1)
    # What they attend, as blocks of the row's document; the rest must be the tail.
    ids = torch.full((total, topk), -1, dtype=torch.int32)
    for row, (pos, start, _) in enumerate(zip(*(field.tolist() for field in rows))):
        complete = (pos + 1) // ratio
        blocks = theirs[row, start : start + complete * ratio].view(complete, ratio)
        assert (blocks == blocks[:, :1]).all()
        ids[row, : int(blocks[:, 0].sum())] = blocks[:, 0].nonzero().flatten().int()
        assert theirs[row].sum() == blocks.sum() + pos + 1 - complete * ratio
        assert theirs[row, start + complete * ratio : start + pos + 1].all()

    ours = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=ratio, topk=topk, checked=True)
    scores = block_scores_naive(q_idx.double(), k_blocks.double(), weights=None, relu=True)
    for selection in (ours, ids):
        assert_differs_only_at_the_cut(scores, selection, rows, ratio=ratio, topk=topk, ulps=4)
    left_out = (rows.pos + 1) // ratio > topk
    at_the_cut = (ours != ids).any(dim=1)
    assert at_the_cut.sum() <= 0.02 * total
    assert left_out.sum() > 0.2 * total or max(lengths) < (topk + 1) * ratio


@pytest.mark.parametrize("topk", [1, 3, 64, 1000])
def test_topk_beyond_the_number_of_blocks(topk):
    rows = rows_of([13, 50], 4)
    q_idx, k_blocks = inputs(rows, num_blocks_of([13, 50], 4))
    got = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=4, topk=topk)
    assert got.shape == (63, topk)
    assert (got >= 0).sum(dim=1).tolist() == [min(topk, (pos + 1) // 4) for pos in rows.pos.tolist()]


def test_no_blocks_at_all_and_no_rows():
    rows = rows_of([3, 2], 4)
    q_idx = torch.randn(5, 2, 4)
    empty = torch.empty(0, 4)
    for backend in ("naive", "chunked"):
        got = select_blocks(q_idx, empty, rows.pos, rows.block_start, ratio=4, topk=3, backend=backend, checked=True)
        assert got.tolist() == [[-1] * 3] * 5
        got = select_blocks(
            q_idx[:0], empty, rows.pos[:0], rows.block_start[:0], ratio=4, topk=3, backend=backend, checked=True
        )
        assert got.shape == (0, 3)


def test_padding_rows_and_blocks_that_nobody_sees_may_hold_nan():
    lengths = [13, 50, 33]
    rows = rows_of(lengths, 4, padding=3)
    q_idx, k_blocks = inputs(rows, num_blocks_of(lengths, 4) + 2)
    expected = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=4, topk=4)
    q_idx[-3:] = float("nan")
    k_blocks[-2:] = float("nan")
    for backend in ("naive", "chunked"):
        got = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=4, topk=4, backend=backend, checked=True)
        assert_identical("ids", expected, got)
        assert (got[-3:] == -1).all()


def test_released_model_sizes_around_the_first_row_that_leaves_a_block_out():
    """512 of 4-token blocks: rows up to 2050 take all, row 2051 has 513 candidates and its own block is one of them."""
    ratio, topk, lengths = 4, 512, [2057]
    rows = rows_of(lengths, ratio).take(torch.arange(2047, 2057))
    q_idx, k_blocks = inputs(rows, num_blocks_of(lengths, ratio), heads=4, channels=128)
    q_idx.abs_()
    k_blocks.abs_()
    k_blocks[512] = -1.0  # relu makes its score 0, all others are positive
    for backend in ("naive", "chunked"):
        got = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=ratio, topk=topk, backend=backend)
        for row, pos in enumerate(range(2047, 2057)):
            complete = (pos + 1) // ratio
            # From row 2051 on the own block 512 is a candidate and, scoring least, loses.
            if complete <= 513:
                assert got[row].tolist() == list(range(512))
            else:
                assert len(set(got[row].tolist())) == 512
                assert 512 not in got[row].tolist()
    k_blocks[512] = 100.0
    got = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=ratio, topk=topk)
    assert 512 in got[4].tolist()
    assert 512 not in got[3].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_same_bits_for_every_chunk_size_and_run(dtype):
    """More rows and blocks than a tile; few distinct keys, so that rounding differences would move ties."""
    lengths, ratio, topk = [700, 613], 1, 24
    rows = rows_of(lengths, ratio)
    q_idx, k_blocks = inputs(rows, sum(lengths), heads=4, channels=64, dtype=dtype)
    k_blocks = k_blocks[torch.randint(0, 40, (sum(lengths),))]
    weights = torch.randn(len(rows.pos), 4)
    chunk_sizes = itertools.product((ROW_TILE, 3 * ROW_TILE, 2**20), (BLOCK_TILE, 2 * BLOCK_TILE, 2**20))
    results = [
        select_blocks_chunked(
            q_idx,
            k_blocks,
            rows.pos,
            rows.block_start,
            ratio=ratio,
            topk=topk,
            weights=weights,
            relu=True,
            row_chunk=row_chunk,
            block_chunk=block_chunk,
        )
        for row_chunk, block_chunk in [(ROW_TILE, BLOCK_TILE), *chunk_sizes]
    ]
    assert len(results) == 10
    for result in results[1:]:
        assert_identical("ids", results[0], result)


def test_any_strides():
    rows = rows_of([13, 50, 33], 4)
    q_idx, k_blocks = inputs(rows, num_blocks_of([13, 50, 33], 4))
    weights = torch.randn(96, 3)
    settings = {"ratio": 4, "topk": 4}
    expected = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, weights=weights, **settings)
    for backend in ("naive", "chunked"):
        got = select_blocks(
            strided(q_idx),
            strided(k_blocks),
            rows.pos,
            rows.block_start,
            weights=strided(weights),
            backend=backend,
            **settings,
        )
        assert_identical("ids", expected, got)


def test_no_gradient_and_no_autocast():
    rows = rows_of([96], 4)
    q_idx, k_blocks = inputs(rows, 24, channels=64)
    expected = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=4, topk=4)
    with torch.autocast("cpu", torch.bfloat16):
        for backend in ("naive", "chunked"):
            got = select_blocks(
                q_idx.requires_grad_(), k_blocks, rows.pos, rows.block_start, ratio=4, topk=4, backend=backend
            )
            assert not got.requires_grad
            assert_identical("ids", expected, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_waits_for_values(dtype):
    rows = rows_of([13, 50, 33], 4, padding=2)
    q_idx, k_blocks = inputs(rows, 24, dtype=dtype)
    with no_host_reads():
        select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=4, topk=4, weights=torch.ones(98, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_grows_with_rows_not_with_rows_times_blocks(dtype):
    def peak(tokens: int) -> int:
        rows = rows_of([tokens], 1)
        q_idx, k_blocks = inputs(rows, tokens, heads=1, channels=4, dtype=dtype)

        def run() -> Tensor:
            return select_blocks_chunked(
                q_idx,
                k_blocks,
                rows.pos,
                rows.block_start,
                ratio=1,
                topk=16,
                weights=None,
                relu=True,
                row_chunk=ROW_TILE,
                block_chunk=BLOCK_TILE,
            )

        run()
        return peak_extra_bytes(run)

    small, large = peak(2048), peak(4096)
    assert large <= 2 * small
    assert large < 4096 * 4096 * dtype.itemsize / 8


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_scores_are_an_error_when_checked(dtype, backend):
    rows = rows_of([13, 50, 33], 4)
    q_idx, k_blocks = inputs(rows, num_blocks_of([13, 50, 33], 4), dtype=dtype)
    q_idx[40, 1, 2] = float("nan")
    with pytest.raises(ValueError, match=r"must not be NaN; 1 rows break it, the first is row 40"):
        select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=4, topk=2, backend=backend, checked=True)


def test_unchecked_nan_neither_stops_nor_moves_other_rows():
    rows = rows_of([96], 4)
    q_idx, k_blocks = inputs(rows, 24)
    expected = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=4, topk=4)
    q_idx[40] = float("nan")
    got = select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=4, topk=4)
    others = torch.arange(96) != 40
    assert_identical("ids", expected[others], got[others])
    assert (got[40] >= 0).all()


@pytest.mark.parametrize("checked", [True, False])
def test_rows_outside_the_blocks_are_found_on_a_cpu(checked):
    rows = rows_of([13, 50, 33], 4)
    q_idx, k_blocks = inputs(rows, num_blocks_of([13, 50, 33], 4) - 1)
    with pytest.raises(ValueError, match=r"end of k_blocks, which has 22 blocks; 2 rows break it, the first is row 94"):
        select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=4, topk=2, checked=checked)
    far = torch.full_like(rows.pos, 2**31 - 1)  # one more is negative
    with pytest.raises(ValueError, match="96 rows break it, the first is row 0, row_block_start=0, row_pos=2147483647"):
        select_blocks(q_idx, k_blocks, far, rows.block_start, ratio=4, topk=2, checked=checked)
    rows.pos[5] = -2
    with pytest.raises(
        ValueError, match=r"row_pos must be -1 or more; 1 rows break it, the first is row 5, row_pos=-2"
    ):
        select_blocks(q_idx, k_blocks, rows.pos, rows.block_start, ratio=4, topk=2, checked=checked)


def test_backends():
    rows = rows_of([96], 4)
    q_idx, k_blocks = inputs(rows, 24)
    arguments = (q_idx, k_blocks, rows.pos, rows.block_start)
    supported, reason = supports(*arguments, ratio=4, topk=4)
    assert not supported
    assert reason
    assert resolve_backend(*arguments, ratio=4, topk=4) == "chunked"
    assert resolve_backend(*arguments, ratio=4, topk=4, backend="naive") == "naive"
    with pytest.raises(ValueError, match=r"select_blocks: backend='tilelang' does not run these arguments: .+"):
        select_blocks(*arguments, ratio=4, topk=4, backend="tilelang")
    with pytest.raises(ValueError, match=r"backend must be one of auto, naive, chunked, tilelang, got 'triton'"):
        select_blocks(*arguments, ratio=4, topk=4, backend="triton")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q_idx": torch.zeros(96, 8)}, ValueError, r"q_idx must be \[Tq, H, d\], got \(96, 8\)"),
        ({"q_idx": [1.0]}, TypeError, "q_idx must be a tensor"),
        ({"q_idx": torch.zeros(96, 3, 8).int()}, TypeError, "q_idx must be bfloat16, .*, got int32"),
        ({"q_idx": torch.zeros(96, 0, 8)}, ValueError, "at least one head"),
        ({"k_blocks": torch.zeros(24, 7)}, ValueError, r"k_blocks must be \[Nb, d\] with d=8, got \(24, 7\)"),
        ({"k_blocks": torch.zeros(24, 8).double()}, TypeError, "k_blocks must be float32, got float64"),
        (
            {"row_pos": torch.zeros(95, dtype=torch.int32)},
            ValueError,
            r"row_pos must be \[Tq\] with Tq=96, got \(95,\)",
        ),
        ({"row_pos": torch.zeros(96, dtype=torch.int64)}, TypeError, "row_pos must be int32, got int64"),
        ({"row_block_start": torch.zeros(96)}, TypeError, "row_block_start must be int32, got float32"),
        (
            {"row_block_start": torch.zeros(96, dtype=torch.int32, device="meta")},
            ValueError,
            "must be on cpu, got meta",
        ),
        ({"weights": torch.zeros(96, 2)}, ValueError, r"weights must be \[Tq, H\] with Tq=96, H=3, got \(96, 2\)"),
        ({"weights": torch.zeros(96, 3).bfloat16()}, TypeError, "weights must be float32, got bfloat16"),
        ({"ratio": 0}, ValueError, "ratio must be at least 1, got 0"),
        # Cut to 32 bits this is 4.
        ({"ratio": 2**32 + 4}, ValueError, "ratio must be at most 2147483647, got 4294967300"),
        ({"topk": 2**31}, ValueError, "topk must be at most 2147483647, got 2147483648"),
        ({"ratio": 4.0}, TypeError, "ratio must be an int, got 4.0"),
        ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
        ({"relu": 1}, TypeError, "relu must be a bool, got 1"),
        ({"checked": None}, TypeError, "checked must be a bool, got None"),
        ({"index_scale": -1.0}, ValueError, r"index_scale must be finite and above 0, got -1\.0"),
        ({"index_scale": "1"}, TypeError, "index_scale must be a number, got '1'"),
        ({"tp_group": "tp"}, TypeError, "tp_group must be a torch.distributed.ProcessGroup, got str"),
    ],
)
def test_wrong_arguments(change, error, message):
    rows = rows_of([96], 4)
    arguments = {
        "q_idx": torch.zeros(96, 3, 8),
        "k_blocks": torch.zeros(24, 8),
        "row_pos": rows.pos,
        "row_block_start": rows.block_start,
        "ratio": 4,
        "topk": 4,
    }
    select_blocks(**arguments)
    with pytest.raises(error, match=f"select_blocks: .*{message}"):
        select_blocks(**(arguments | change))


def test_chunks_that_are_not_whole_tiles():
    rows = rows_of([4], 4)
    with pytest.raises(ValueError, match=r"multiples of 128 and 512, got 100 and 512"):
        select_blocks_chunked(
            *inputs(rows, 1), rows.pos, rows.block_start, ratio=4, topk=1, weights=None, relu=True,
            row_chunk=100, block_chunk=512,
        )  # fmt: skip
