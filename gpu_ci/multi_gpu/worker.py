"""What each process of a job does. Imports torch when called, as the launcher forks processes that import this."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_ci.multi_gpu.plan import Job, job_from_dict


def work(fields: dict[str, Any], folder: str, device: str, steps: int, tokens: int) -> None:
    """Run the cases of a job; rank 0 appends each one's record to `results-JOB.jsonl` in `folder` as it is done.

    Args:
        fields: of the `Job`.
        folder: where trainings on one rank are kept, for the other jobs.
        device: "cuda" or "cpu".
        steps: of each training.
        tokens: of each rank, in weak scaling.

    Raises:
        whatever a case raises: the launcher then ends the other ranks.
    """
    from mcore_patches.demo.device import quiet

    job, path = job_from_dict(fields), Path(folder)
    with quiet():
        started = time.monotonic()
        for record in _records(job, path, device, steps, tokens):
            seconds = time.monotonic() - started
            if os.environ["RANK"] == "0":
                with (path / f"results-{job.name}.jsonl").open("a") as file:
                    file.write(json.dumps({"seconds": seconds, **record}) + "\n")
            started = time.monotonic()


def _records(job: Job, folder: Path, device: str, steps: int, tokens: int) -> Iterator[dict[str, Any]]:
    from gpu_ci.multi_gpu import kernels, scaling, training, world

    with world.joined(device) as here:
        if job.kind == "warmup":
            yield kernels.once_a_node(job, here)
        elif job.kind == "scaling":
            yield from scaling.layer(job, here, tokens)
        else:
            yield from training.cases(job, here, folder, steps)
