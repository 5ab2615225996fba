"""Compile one kernel for a GPU that need not be there, and tell what ptxas says of it."""

import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Report:
    """What an assembled kernel takes.

    shared_bytes: dynamic shared memory of a block. spilled: bytes of spill loads and stores. registers: of a thread at
    entry. split: what each warp group asks for later (setmaxnreg). warnings: lines of ptxas about performance that it
    gave up (C75xx).
    """

    shared_bytes: int
    spilled: int
    registers: int
    split: tuple[int, ...]
    warnings: tuple[str, ...]


def compile_report(
    module: str, builder: str, arguments: dict[str, Any], arch: str, pass_configs: dict[str, Any] | None = None
) -> Report:
    """Lower `module.builder(**arguments)` and assemble it for `arch` ("sm_90a"); pass_configs: the module's own."""
    import tilelang
    import tvm
    from tilelang.engine.lower import lower

    source = importlib.import_module(module)
    target = {"kind": "cuda", "arch": arch}
    with (
        tvm.target.Target(target),
        tilelang.transform.PassContext(opt_level=3, config=dict(pass_configs or source.PASS_CONFIGS)),
    ):
        artifact = lower(getattr(source, builder)(**arguments), target=target, enable_device_compile=False)
    (function,) = artifact.device_mod.functions.values()
    attributes = {str(name): value for name, value in function.attrs.items()}
    messages = _assemble(artifact.kernel_source, arch, Path(tilelang.__file__).parent)
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", messages))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", messages))
    split = tuple(int(n) for n in re.findall(r"warpgroup_reg_(?:alloc|dealloc)<(\d+)>", artifact.kernel_source))
    warnings = tuple(line for line in messages.splitlines() if "(C7" in line)
    return Report(int(attributes.get("dyn_shared_memory_buf", 0)), spilled, registers, split, warnings)


def _assemble(code: str, arch: str, root: Path) -> str:
    assert shutil.which("nvcc"), "nvcc of the CUDA toolkit (12.8 or newer) is not on PATH"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cu")
        path.write_text(code)
        command = ["nvcc", "-std=c++20", "-cubin", f"-gencode=arch=compute_{arch[3:]},code={arch}", "--use_fast_math"]
        command += ["-Xptxas", "-v", "-I", str(root / "src"), "-I", str(root / "3rdparty/cutlass/include")]
        done = subprocess.run(
            [*command, "-o", os.devnull, str(path)], capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr
