"""Records of cases as lines to read, and as rows of results.csv."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

BENCH = "multi_gpu"
MOST_LINES = 40  # of a failure


def line(record: dict[str, Any]) -> str:
    """Name, result, largest relative errors of the loss and of a gradient, peak memory of a rank, seconds; reasons."""
    fields = [f"{record['name']:<26}", "FAILED" if record["faults"] else "passed"]
    if "loss" in record:
        fields.append(f"loss {record['first_loss']:.1e} first {record['loss']:.1e} all")
        fields.append(f"indexer {record['indexer']:.1e}  gradients {record['gradients']:.1e} all")
        fields.append(f"{record['gradient']:.1e} worst {record['given']:.1e} with given routes")
        fields.append(f"step {record['step_ms']:.0f} ms")
    if "forward_ms" in record:
        fields.append(f"{record['tokens']} tokens, forward {record['forward_ms']:.2f} ms")
        fields.append(f"backward {record['backward_ms']:.2f} ms")
    if "compiled" in record:
        fields.append(f"{record['kernels']} kernels, compiled by rank {record['compiled']}")
    if "peaks" in record:
        fields.append(f"peak {max(record['peaks']):.3f} GiB")
    if "seconds" in record:
        fields.append(f"{record['seconds']:.1f} s")
    reasons = [f"    {text}" for fault in record["faults"] for text in _shortened(fault)]
    return "\n".join(["  ".join(fields), *reasons])


def _shortened(fault: str) -> list[str]:
    """The lines of a fault; of a long one its beginning and end, which hold the error and what was printed last."""
    lines = fault.splitlines()
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES // 2], "...", *lines[-MOST_LINES // 2 :]]


def rows(records: Iterable[dict[str, Any]], gpus: int) -> list[dict[str, str]]:
    """Rows of results.csv, of what passed: for each layout and model the worst of its cases, and the scaling."""
    from gpu_ci.bench.results import row

    passed = [record for record in records if not record["faults"]]
    found = []
    for group, members in _groups(passed).items():
        case = f"{gpus}x-{group}"
        found += [
            row(BENCH, case, "loss beside one GPU, largest relative difference", _worst(members, "loss"), ""),
            row(BENCH, case, "gradients beside one GPU, relative error", _worst(members, "gradients"), ""),
            row(BENCH, case, "gradient beside one GPU, largest relative error", _worst(members, "gradient"), ""),
            *(
                [row(BENCH, case, "the same with the routes of one GPU", _worst(members, "given"), "")]
                if group.endswith("qsa")
                else []
            ),
            row(BENCH, case, "peak memory of a rank", max(max(m["peaks"]) for m in members), "GiB"),
            row(BENCH, case, "step, slowest case", _worst(members, "step_ms"), "ms"),
        ]
    sizes = [record for record in passed if "forward_ms" in record]
    for record in sizes:
        case = f"{gpus}x-{record['name']}-T{record['tokens']}"
        found += [
            row(BENCH, case, "forward", record["forward_ms"], "ms"),
            row(BENCH, case, "backward", record["backward_ms"], "ms"),
            row(BENCH, case, "peak memory of a rank", max(record["peaks"]), "GiB"),
        ]
        if record is not sizes[0]:
            ratio = _both(sizes[0]) / _both(record)
            found.append(row(BENCH, case, "forward + backward, one rank's tokens / all ranks'", ratio, ""))
    return found


def _groups(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Trainings by layout and model, "CP2-qsa"."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if "loss" in record:
            groups.setdefault("-".join(record["name"].split("-")[:-2]), []).append(record)
    return groups


def _worst(records: list[dict[str, Any]], field: str) -> float:
    return max(record[field] for record in records)


def _both(record: dict[str, Any]) -> float:
    return record["forward_ms"] + record["backward_ms"]


def device_name(device: str) -> str:
    from gpu_ci.bench import results

    return "CPU" if device == "cpu" else results.device()
