"""Two processes that want one kernel compile it once; needs nvcc."""

from pathlib import Path

from mcore_patches.cpu.launch import run


def test_one_compiles_and_the_other_loads(tmp_path: Path) -> None:
    results = run("tests.gpu_ci.kernel_cases:twice", nprocs=2, env={"TILELANG_CACHE_DIR": str(tmp_path)})
    assert results[0] == results[1]
    cold, warm = results[0]
    assert cold["faults"] == [] and sorted(cold["compiled"]) == [0, 1] and cold["kernels"] == 1
    assert warm["compiled"] == [0, 0] and warm["kernels"] == 1
    assert [fault for fault in warm["faults"] if "was not empty" in fault]
