"""What the TileLang kernels of select_blocks and indexer_kl write, in plain torch: for tests of what calls them.

Each takes the arguments of the kernel whose name it has, on a CPU, and leaves alone what the kernel leaves alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_patches.ops.block_topk.design import GROUP, INVISIBLE
from mcore_patches.ops.block_topk.naive import block_scores_naive
from mcore_patches.ops.indexer_kl.design import KEY_GRADIENT_ROWS, ROWS_PER_WORD, TILE_ROWS, Shape


def score(
    q: Tensor, k: Tensor, weights: Tensor, first: Tensor, count: Tensor, keys: Tensor, maxima: Tensor, skipped: int,
    splits: int,
) -> None:  # fmt: skip
    """With relu, and with weights if there is one for every row."""
    assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k))
    assert splits >= 1 and skipped >= 0
    scores = block_scores_naive(q, k, weights=weights if len(weights) == len(q) else None, relu=True)
    bits = scores.float().view(torch.int32)
    local = torch.arange(len(k)) - first[:, None]
    values = torch.where(bits < 0, INVISIBLE - bits, bits).masked_fill(
        (local < 0) | (local >= count[:, None]), INVISIBLE
    )
    keys.view(len(q), -1).fill_(INVISIBLE)[:, : len(k)] = values
    maxima.view(len(q), -1).copy_(keys.view(len(q), -1, GROUP).amax(dim=2))


def indexer_kl_kernels(shape: Shape) -> dict[str, Callable[..., None]]:
    """Those of `indexer_kl`, by name."""
    of_shape: dict[str, Callable[..., None]] = {
        "union": union,
        "teacher": teacher,
        "gather": gather,
        "student": student,
        "blocks": blocks,
        "many_heads": many_heads,
        "query_gradient": query_gradient,
        "key_gradient": key_gradient,
    }
    plain: dict[str, Callable[..., None]] = {
        "mark": mark,
        "rank": rank,
        "locate": locate,
        "rows": rows,
        "sum": add_parts,
    }
    return plain | {name: functools.partial(kernel, shape) for name, kernel in of_shape.items()}


def union(
    shape: Shape, block_ids: Tensor, first: Tensor, seen: Tensor, start: Tensor, count: Tensor, tokens: Tensor,
    places: Tensor, numbers: Tensor,
) -> None:  # fmt: skip
    assert len(count) == len(tokens) == -(-len(block_ids) // TILE_ROWS)
    valid = (block_ids >= 0) & (block_ids < seen[:, None])
    numbers.copy_(torch.where(valid, block_ids + first[:, None], -1))
    token = start[:, None] + block_ids * shape.ratio
    for tile in range(len(count)):
        here = slice(tile * TILE_ROWS, (tile + 1) * TILE_ROWS)
        first_token = {int(n): int(t) for n, t in zip(numbers[here].flatten(), token[here].flatten()) if n >= 0}
        listed = sorted(first_token)
        count[tile] = len(listed)
        tokens[tile, : len(listed)] = torch.tensor([first_token[n] for n in listed], dtype=torch.int32)
        places[here] = torch.tensor(
            [[listed.index(n) if n >= 0 else -1 for n in row] for row in numbers[here].tolist()]
        )


def teacher(
    shape: Shape, q: Tensor, k: Tensor, lse: Tensor, begin: Tensor, count: Tensor, tokens: Tensor, mass: Tensor,
    scale: float, splits: int,
) -> None:  # fmt: skip
    assert splits >= 1 and len(mass) == len(count) == -(-len(q) // TILE_ROWS)
    group = shape.q_heads // shape.kv_heads
    for tile, (start, number) in enumerate(zip(begin.tolist(), count.tolist())):
        mine = (torch.arange(TILE_ROWS) + tile * TILE_ROWS).clamp(max=len(q) - 1)
        members = (
            tokens[start : start + number, None].long() + torch.arange(shape.ratio) if number else tokens[:0].long()
        )
        keys = k[members.flatten()].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("rhd,thd->trh", q[mine].float(), keys) * scale
        sums = (scores - lse[mine]).exp().sum(dim=2)
        if not shape.ranks:
            sums = sums.unflatten(0, (number, shape.ratio)).amax(dim=1) if number else sums
        mass[tile, : len(sums)] = sums


def gather(shape: Shape, mass: Tensor, places: Tensor, out: Tensor) -> None:
    width = shape.masses_of_a_block
    columns = places.clamp(min=0)[:, :, None] * width + torch.arange(width)
    row = torch.arange(len(places))[:, None, None]
    found = mass[row // TILE_ROWS, columns, row % TILE_ROWS]
    out.copy_(torch.where(places[:, :, None] >= 0, found, 0).flatten(1))


def _bit(row: int) -> int:
    """As a signed word of 32 bits."""
    place = row % ROWS_PER_WORD
    return 1 << place if place < 31 else -(1 << 31)


def mark(numbers: Tensor, bits: Tensor, slots: Tensor) -> None:
    for row, chosen in enumerate(numbers.tolist()):
        for place, block in enumerate(chosen):
            if block >= 0:
                word = bits[row // ROWS_PER_WORD]
                slots[row, place] = word[block] & _bit(row)
                word[block] |= _bit(row)


def _popcounts(bits: Tensor) -> Tensor:
    return ((bits[..., None] >> torch.arange(ROWS_PER_WORD, dtype=torch.int32)) & 1).sum(dim=-1, dtype=torch.int32)


def rank(bits: Tensor, before: Tensor, count: Tensor) -> None:
    counts = _popcounts(bits)
    before.copy_(counts.cumsum(0) - counts)
    count.copy_(counts.sum(dim=0))


def locate(
    numbers: Tensor, bits: Tensor, before: Tensor, count: Tensor, ends: Tensor, slots: Tensor, times: Tensor
) -> None:
    for row, chosen in enumerate(numbers.tolist()):
        word, below = row // ROWS_PER_WORD, torch.tensor((1 << row % ROWS_PER_WORD) - 1, dtype=torch.int32)
        for place, block in enumerate(chosen):
            again, slots[row, place] = int(slots[row, place] != 0), -1
            if block >= 0:
                lower = _popcounts(bits[word, block] & below)
                slots[row, place] = ends[block] - count[block] + before[word, block] + lower
                times[slots[row, place]] += again


def student(
    shape: Shape, q: Tensor, k: Tensor, weights: Tensor, row_weight: Tensor, numbers: Tensor, mass: Tensor,
    pairs: Tensor, kl: Tensor, dq: Tensor, dweights: Tensor, pair_row: Tensor, pair_coefficient: Tensor,
    pair_heads: Tensor, index_scale: float,
) -> None:  # fmt: skip
    assert all(x.is_contiguous() for x in (q, weights, row_weight, numbers, mass, pairs, kl, dq, dweights))
    for row in range(len(q)):
        kl[row], dq[row] = 0, 0
        if shape.weighted:
            dweights[row] = 0
        there = numbers[row] >= 0
        if row_weight[row] == 0 or not there.any():
            continue
        keys, teacher_mass = k[numbers[row, there]].float(), mass[row, there]
        head_weights = weights[row] if shape.weighted else torch.ones(shape.heads)
        products = q[row].float() @ keys.T
        through = products > 0 if shape.relu else torch.ones_like(products, dtype=torch.bool)
        log_student = (index_scale * (head_weights @ (products * through))).log_softmax(dim=0)
        gradient = torch.zeros_like(log_student)
        if teacher_mass.sum() != 0:
            share = teacher_mass / teacher_mass.sum()
            kl[row] = (torch.xlogy(share, share) - share * log_student).sum()
            gradient = (log_student.exp() - share) * row_weight[row] * index_scale
        flow = (through * gradient) @ keys
        dq[row] = head_weights[:, None] * flow
        if shape.weighted:
            dweights[row] = (q[row].float() * flow).sum(dim=1)
        places = pairs[row, there].long()
        pair_row[places] = row
        pair_coefficient[places] = gradient
        pair_heads[places] = (through.int() << torch.arange(shape.heads, dtype=torch.int32)[:, None]).sum(0).int()


def blocks(
    shape: Shape, q: Tensor, weights: Tensor, counts: Tensor, ends: Tensor, pair_row: Tensor, pair_coefficient: Tensor,
    pair_heads: Tensor, dk: Tensor,
) -> None:  # fmt: skip
    for block, (count, end) in enumerate(zip(counts.tolist(), ends.tolist())):
        mine = slice(end - count, end)
        factor = ((pair_heads[mine, None] >> torch.arange(shape.heads, dtype=torch.int32)) & 1).float()
        factor = factor * pair_coefficient[mine, None]
        row = pair_row[mine].long()
        if shape.weighted:
            factor = factor * weights[row]
        dk[block] += torch.einsum("ph,phd->d", factor, q[row].float())


def many_heads(
    shape: Shape, q: Tensor, k: Tensor, weights: Tensor, row_weight: Tensor, numbers: Tensor, mass: Tensor,
    pairs: Tensor, kl: Tensor, dq: Tensor, dweights: Tensor, parts: Tensor, index_scale: float,
) -> None:  # fmt: skip
    pair_row, coefficient = torch.zeros(len(parts), dtype=torch.int32), torch.zeros(len(parts))
    # As many heads do not fit a word of bits: what flows through them is worked out anew.
    student(
        shape, q, k, weights, row_weight, numbers, mass, pairs, kl, dq, dweights, pair_row, coefficient,
        torch.zeros_like(pair_row), index_scale,
    )  # fmt: skip
    for row in range(len(q)):
        for block, pair in zip(numbers[row].tolist(), pairs[row].tolist()):
            if block >= 0:
                through = (q[row].float() @ k[block].float() > 0).float() if shape.relu else torch.ones(shape.heads)
                through = through * (weights[row] if shape.weighted else 1) * coefficient[pair]
                parts[pair] = through @ q[row].float()


def add_parts(parts: Tensor, counts: Tensor, ends: Tensor, times: Tensor, dk: Tensor) -> None:
    for block, (count, end) in enumerate(zip(counts.tolist(), ends.tolist())):
        mine = slice(end - count, end)
        dk[block] += (parts[mine].float() * times[mine, None]).sum(dim=0)


def rows(
    mass: Tensor, keys: Tensor, begin: Tensor, count: Tensor, first: Tensor, seen: Tensor, row_weight: Tensor,
    kl: Tensor, gradient: Tensor, index_scale: float,
) -> None:  # fmt: skip
    assert len(mass) == len(begin) == len(count) == -(-len(keys) // TILE_ROWS)
    for row in range(len(keys)):
        tile, start, number = row // TILE_ROWS, int(first[row]), int(seen[row])
        kl[row] = 0
        if number == 0:
            continue
        base = int(begin[tile])
        assert base <= start and start + number <= base + int(count[tile])
        bits = keys[row, start : start + number]
        scores = torch.where(bits < 0, INVISIBLE - bits, bits).view(torch.float32) * index_scale
        mine = mass[tile, start - base : start - base + number, row % TILE_ROWS]
        log_student, student_less_teacher = scores.log_softmax(dim=0), torch.zeros(number)
        if mine.sum() != 0:
            share = mine / mine.sum()
            kl[row] = (torch.xlogy(share, share) - share * log_student).sum()
            student_less_teacher = log_student.exp() - share
        gradient[row, start : start + number] = student_less_teacher * row_weight[row] * index_scale


def _flow(shape: Shape, q: Tensor, k: Tensor, seen: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Queries, zeros where the row sees nothing, and what flows back to each product [Tq, H, Nb] before weights."""
    queries = q.float().masked_fill((seen == 0)[:, None, None], 0)
    flow = gradient[:, None, : len(k)].float().expand(-1, shape.heads, -1)
    return queries, flow * ((queries @ k.float().T) > 0) if shape.relu else flow


def query_gradient(
    shape: Shape, q: Tensor, k: Tensor, weights: Tensor, seen: Tensor, begin: Tensor, end: Tensor, gradient: Tensor,
    dq: Tensor, dweights: Tensor,
) -> None:  # fmt: skip
    assert len(begin) == len(end) == -(-len(q) // shape.query_gradient_rows)
    queries, flow = _flow(shape, q, k, seen, gradient)
    total = flow @ k.float()
    if shape.weighted:
        dweights.copy_((queries * total).sum(dim=2))
        total = total * weights.masked_fill((seen == 0)[:, None], 0)[:, :, None]
    dq.copy_(total)


def key_gradient(
    shape: Shape, q: Tensor, k: Tensor, weights: Tensor, seen: Tensor, begin: Tensor, end: Tensor, gradient: Tensor,
    dk: Tensor,
) -> None:  # fmt: skip
    assert len(begin) == len(end) == -(-len(q) // KEY_GRADIENT_ROWS)
    queries, flow = _flow(shape, q, k, seen, gradient)
    if shape.weighted:
        flow = flow * weights.masked_fill((seen == 0)[:, None], 0)[:, :, None]
    dk += torch.einsum("rhb,rhd->bd", flow, queries)


def take_cpu_tensors(monkeypatch: Any, device: Any) -> None:
    """Let the TileLang backends of both ops take CPU tensors for those of `device`, and run what is here."""
    from mcore_patches.ops.block_topk import tilelang_backend as of_selection
    from mcore_patches.ops.indexer_kl import tilelang_all, tilelang_backend, tilelang_selected

    for module in (of_selection, tilelang_backend):
        monkeypatch.setattr(module, "KERNELS_DEVICE", "cpu")
        monkeypatch.setattr(module, "device_of", lambda _: device)
        monkeypatch.setattr(module, "import_fault", lambda: "")
    for user in (tilelang_all, tilelang_selected):
        monkeypatch.setattr(user, "kernels", lambda _, shape: indexer_kl_kernels(shape))
    monkeypatch.setattr(tilelang_all, "score_kernel", lambda *_: score)
