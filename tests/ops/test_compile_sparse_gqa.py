"""Compile-only: the sparse GQA kernels assemble for their GPUs, fit shared memory and keep their registers."""

import concurrent.futures
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch

from mcore_patches.ops.sparse_gqa.design import Design, sparse_gqa_design
from mcore_patches.ops.sparse_gqa.tilelang_kernels import Kernels, Shape, specifications
from tests.ops.architectures import SHARED_BYTES
from tests.ops.compiling import Report, compile_report

pytestmark = pytest.mark.xdist_group("compile_sparse_gqa")

# Bytes of spill loads and stores of a thread, together.
SPILLED_AT_MOST = 32


@dataclass(frozen=True)
class Case:
    name: str
    heads: int = 24
    kv_heads: int = 2
    dim: int = 256
    block_size: int = 4
    topk: int = 512
    arch: str = "sm_90a"

    def __str__(self) -> str:
        group = self.heads // self.kv_heads
        return f"{self.arch}-{self.name}-G{group}-D{self.dim}-r{self.block_size}-K{self.topk}"

    @property
    def kernels(self) -> Kernels:
        group = self.heads // self.kv_heads
        settings = (torch.bfloat16, self.dim, group, self.block_size, self.topk)
        design = sparse_gqa_design(self.arch, SHARED_BYTES[self.arch], *settings)
        assert isinstance(design, Design), design
        shape = Shape(self.arch, self.heads, self.kv_heads, self.dim, self.block_size, self.topk)
        return Kernels(shape, design)


CASES = [
    *(Case(name) for name in Case("").kernels.named_builds()),
    # The most matrix rows of a tile, the widest steps, the largest lists.
    Case("union_forward", heads=8, kv_heads=1),
    Case("backward_union", heads=16, kv_heads=1, block_size=16),
    Case("backward_window", heads=2, kv_heads=2),
    Case("plan", block_size=1, topk=4096),
    *(Case(name, arch="sm_100a") for name in Case("", arch="sm_100a").kernels.named_builds()),
    Case("row_forward", arch="sm_89"),
    Case("backward_window", heads=3, kv_heads=1, dim=128, arch="sm_89"),
]


def report_of(case: Case) -> Report:
    kernels = case.kernels
    kernel = specifications(kernels.shape, kernels.design)[case.name]
    module = f"mcore_patches.ops.sparse_gqa.{kernel.module}"
    return compile_report(module, kernel.builder, dict(kernel.arguments), case.arch, dict(kernel.pass_configs))


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[Report]]]:
    """What compiles in two processes at a time, of the cases that this session runs."""
    here = [item for item in request.session.items if isinstance(item, pytest.Function)]
    wanted = {item.callspec.params["case"] for item in here if item.module is request.module}
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield {case: pool.submit(report_of, case) for case in sorted(wanted, key=CASES.index)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_fits(case: Case, reports: dict[Case, Future[Report]]) -> None:
    report = reports[case].result(timeout=900)
    assert report.shared_bytes + 1024 <= SHARED_BYTES[case.arch]
    assert report.spilled <= SPILLED_AT_MOST
    assert report.warnings == ()
    if case.name.endswith("plan"):
        kernels = case.kernels
        tiles = kernels.design.forward if case.name == "plan" else kernels.design.backward.union
        assert report.shared_bytes <= tiles.plan_shared_bytes(case.topk, case.block_size)
    if (plain := case.kernels.design.plain) is not None:
        assert report.shared_bytes <= plain.shared_bytes(case.dim)
    if report.split:
        # With setmaxnreg the register count is that at entry: a group that asks for more than the others left waits
        # for ever.
        assert report.registers <= 65536 // (128 * len(report.split)) // 8 * 8
        assert sum(report.split) <= report.registers * len(report.split)
