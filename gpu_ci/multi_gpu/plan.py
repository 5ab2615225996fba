"""What is run on a number of GPUs: layouts, and the cases of each. Plain values; imports neither torch nor megatron."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

MODELS = ("qsa", "dsa")
# Documents whose lengths are padded to a multiple of it lie alike in every layout of up to 8 ranks (2 CP x TP).
MULTIPLE = 16


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layout; sequence parallelism is on with tensor parallelism. What they leave of the ranks is data
    parallel, each copy with the same batches."""

    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def name(self) -> str:
        parts = [f"TP{self.tp}-SP"] if self.tp > 1 else []
        parts += [f"{what}{size}" for what, size in (("CP", self.cp), ("PP", self.pp)) if size > 1]
        return "-".join(parts) or "one"


@dataclass(frozen=True)
class Case:
    """One training of a tiny model. form: "bshd" or "thd"; recompute: "none", "full" or "core_attn"."""

    model: str
    form: str
    recompute: str
    sizes: Sizes = Sizes()

    @property
    def name(self) -> str:
        return f"{self.sizes.name}-{self.model}-{self.form}-{self.recompute}"

    @property
    def reference(self) -> str:
        """The case on one rank that the results must equal."""
        return f"{Sizes().name}-{self.model}-{self.form}-none"


@dataclass(frozen=True)
class Job:
    """Cases that one set of processes runs, as their imports take longer than a case.

    kind: "train", "warmup" or "scaling".
    """

    kind: str
    name: str
    ranks: int
    cases: tuple[Case, ...] = ()

    def case_names(self) -> list[str]:
        """What its lines are called, in order."""
        if self.kind == "train":
            return [case.name for case in self.cases]
        if self.kind == "scaling":
            return [f"{self.name}-CP{cp}" for cp in powers_of_two(self.ranks)]
        return [self.name]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def job_from_dict(fields: dict[str, Any]) -> Job:
    """The inverse of `Job.as_dict`."""
    cases = tuple(Case(**{**case, "sizes": Sizes(**case["sizes"])}) for case in fields["cases"])
    return Job(**{**fields, "cases": cases})


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 up to `most`."""
    return [1 << n for n in range(most.bit_length())]


def layouts(gpus: int) -> list[Sizes]:
    """The layouts of several ranks that fit `gpus`, a power of two up to 8.

    Raises:
        ValueError: `gpus` is something else.
    """
    if gpus not in (1, 2, 4, 8):
        raise ValueError(f"gpus={gpus}: must be 1, 2, 4 or 8")
    every = [Sizes(tp=2), Sizes(cp=2), Sizes(pp=2), Sizes(tp=2, cp=2), Sizes(tp=2, cp=2, pp=2)]
    return [sizes for sizes in every if sizes.ranks <= gpus]


def cases(sizes: Sizes) -> Iterator[Case]:
    """Those of every layout: batches and packed documents, and both kinds of recomputation on the packed ones."""
    for model in MODELS:
        yield Case(model, "bshd", "none", sizes)
        yield Case(model, "thd", "none", sizes)
        yield Case(model, "thd", "full", sizes)
        yield Case(model, "thd", "core_attn", sizes)


def jobs(gpus: int) -> list[Job]:
    """All jobs, in order: kernels first, then one rank, which the others are compared with."""
    planned = [Job("warmup", "warmup", max(2, gpus)), Job("train", "one", 1, tuple(cases(Sizes())))]
    if several := tuple(case for sizes in layouts(gpus) for case in cases(sizes)):
        planned.append(Job("train", "several", gpus, several))
    return [*planned, Job("scaling", "layer", gpus)]
