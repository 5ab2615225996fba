"""What is wrong with what the ranks of a job say: pure functions of what each passes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gpu_ci.multi_gpu.compare import largest, relative

# Ranks that hold a whole gradient hold the same one.
AMONG_RANKS = 1e-5


def route_faults(ranks: list[dict[str, Any]], recomputed: bool) -> list[str]:
    """What is wrong with the routes of a step, of all ranks: entries with "place", "first" and "again".

    place: (cp_rank, pp_rank); ranks of one place must have attended the same. recomputed: whether every pass must have
    been repeated, with the same ids; else none may have been.
    """
    found = []
    by_place: dict[Any, dict[str, Any]] = {}
    for rank, entry in enumerate(ranks):
        first, again = entry["first"], entry["again"]
        if not first or not all(first.values()):
            found.append(f"rank {rank} recorded no routes")
        if again != (first if recomputed else {}):
            layers = sorted(n for n in {*first, *again} if again.get(n) != (first.get(n) if recomputed else None))
            found.append(f"rank {rank}, layers {layers}: recomputed passes attended something else, or none came")
        other = by_place.setdefault(tuple(entry["place"]), entry)
        if other["first"] != first:
            layers = sorted(n for n in {*first, *other["first"]} if first.get(n) != other["first"].get(n))
            found.append(f"rank {rank}, layers {layers}: attended something else than a rank with the same tokens")
    return found


def disagreement(norms: list[dict[str, float]]) -> list[str]:
    """Gradients whose norms differ between ranks, of which each passes those of all whole gradients."""
    found = []
    for name, norm in norms[0].items():
        others = [other.get(name, float("nan")) for other in norms]
        worst = largest(relative(norm, other) for other in others)
        if not worst <= AMONG_RANKS:
            found.append(f"gradient of {name} differs between ranks by {worst:.2e}")
    return found


def digest_faults(digests: list[str]) -> list[str]:
    """What is wrong with the ranks' digests of their reports of patches."""
    return [f"report digests differ: {digests}"] if len(set(digests)) > 1 else []


def build_faults(ranks: list[dict[str, Any]]) -> list[str]:
    """What is wrong: of each rank "compiled", names of kernels that it compiled, "keys" of those that it then had, and
    "failed", reasons by key."""
    found = [f"rank {rank}: {why}" for rank, entry in enumerate(ranks) for why in entry["failed"].values()]
    times = Counter(name for entry in ranks for name in entry["compiled"])
    found += [f"{name} was compiled {n} times" for name, n in times.items() if n > 1]
    if len({tuple(entry["keys"]) for entry in ranks}) > 1:
        found.append(f"ranks have different kernels: {[len(entry['keys']) for entry in ranks]}")
    if not times:
        found.append("nothing was compiled, so nothing is known: the kernels' cache was not empty")
    return found
