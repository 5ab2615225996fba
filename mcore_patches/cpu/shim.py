"""Lets an installed megatron-core run on a machine without CUDA, Transformer Engine and fast_hadamard_transform.

Nothing of megatron's source is edited. ``torch.cuda`` entry points and a few megatron globals are rebound while
the shim is on, each recorded with the reason (:func:`rebindings`), and put back by :func:`disable`.

    with cpu_megatron():
        ...  # build, train

The shim may come before or after ``import megatron.core``; it may be turned on and off any number of times.
It belongs to the thread that turned it on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mcore_patches.cpu.layers import DuplicatedLinear, hadamard_transform, rotate_activation
from mcore_patches.cpu.rebinding import Rebinding, RebindingLog

__all__ = ["cpu_megatron", "disable", "enable", "is_enabled", "package_stand_ins", "rebindings"]

_log: RebindingLog | None = None
_mode: TorchFunctionMode | None = None


@contextlib.contextmanager
def cpu_megatron(*, allow_cuda: bool = False) -> Iterator[None]:
    """Megatron on the CPU inside the block. Inside another such block it does nothing.

    Args:
        allow_cuda: run on the CPU although the machine has CUDA.

    Raises:
        RuntimeError: the machine has CUDA and ``allow_cuda`` is False.
    """
    if is_enabled():
        yield
        return
    enable(allow_cuda=allow_cuda)
    try:
        yield
    finally:
        disable()


def enable(*, allow_cuda: bool = False) -> None:
    """Turn the shim on until :func:`disable`.

    Raises:
        RuntimeError: it is on already, or the machine has CUDA and ``allow_cuda`` is False.
    """
    global _log, _mode
    if is_enabled():
        raise RuntimeError("the CPU shim is on already: call disable() first, or nest cpu_megatron() blocks")
    if torch.cuda.is_available() and not allow_cuda:
        raise RuntimeError(
            f"the CPU shim sends every CUDA request of this process to the CPU, and this machine has "
            f"{torch.cuda.device_count()} CUDA device(s): hide them with CUDA_VISIBLE_DEVICES='', or pass "
            "allow_cuda=True"
        )
    log, mode = RebindingLog(), _CudaToCpu()
    try:
        _send_cuda_to_cpu(log)
        _keep_mode_in_backward(log, mode)
        _run_eagerly(log)
        _stand_in_for_packages(log)
    except BaseException:
        log.undo()
        raise
    _log, _mode = log, mode
    mode.__enter__()


def disable() -> None:
    """Turn the shim off: every rebound name is the original object again.

    Raises:
        RuntimeError: the shim is off, another thread or a later ``TorchFunctionMode`` is in the way, or other code
            rebound one of the shim's names since (undo that first). The shim then stays on.
    """
    global _log, _mode
    if _log is None or _mode is None:
        raise RuntimeError("the CPU shim is off: enable() it first")
    # Leaving a mode pops whatever is on top of the thread's stack.
    if torch.overrides._get_current_function_mode() is not _mode:
        raise RuntimeError(
            "the CPU shim cannot be turned off here: a TorchFunctionMode entered after it is still active, "
            "or it was turned on in another thread"
        )
    _log.undo()
    _mode.__exit__(None, None, None)
    _log = _mode = None


def is_enabled() -> bool:
    """Whether the shim is on in this process."""
    return _log is not None


def rebindings() -> tuple[Rebinding, ...]:
    """What the shim has rebound, in order, with the reasons; empty when it is off."""
    return tuple(_log) if _log is not None else ()


@contextlib.contextmanager
def package_stand_ins() -> Iterator[None]:
    """Only the stand-ins for Transformer Engine and fast_hadamard_transform, for a machine with CUDA but without them.

    :func:`cpu_megatron` includes them.
    """
    log = RebindingLog()
    _stand_in_for_packages(log)
    try:
        yield
    finally:
        log.undo()


def _send_cuda_to_cpu(log: RebindingLog) -> None:
    cpu = torch.device("cpu")
    cuda = torch.cuda
    log.rebind(cuda, "current_device", lambda: cpu, "is passed as device= by rotary embeddings, buffers and DDP")

    generator = "megatron's 'CUDA' random tracker then saves, forks and restores the CPU generator"
    for module in (cuda, cuda.random):
        log.rebind(module, "get_rng_state", lambda device="cuda": torch.get_rng_state(), generator)
        log.rebind(module, "set_rng_state", lambda new_state, device="cuda": torch.set_rng_state(new_state), generator)
    log.rebind(cuda, "manual_seed", lambda seed: torch.manual_seed(seed), generator)
    tracker = importlib.import_module("megatron.core.tensor_parallel.random")
    log.rebind(
        tracker,
        "_set_cuda_rng_state",
        lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
        generator,
    )

    stream = "schedules, DDP and checkpoints synchronise streams; the CPU has none"
    log.rebind(cuda, "synchronize", lambda device=None: None, stream)
    log.rebind(cuda, "current_stream", lambda device=None: _NullStream(), stream)
    log.rebind(cuda, "stream", lambda stream: contextlib.nullcontext(), stream)

    profiler = "range annotations call into the CUDA runtime"
    log.rebind(cuda.nvtx, "range_push", lambda message: None, profiler)
    log.rebind(cuda.nvtx, "range_pop", lambda: None, profiler)


def _keep_mode_in_backward(log: RebindingLog, mode: TorchFunctionMode) -> None:
    run_backward = torch.autograd._engine_run_backward

    @functools.wraps(run_backward)
    def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    log.rebind(
        torch.autograd,
        "_engine_run_backward",
        run_backward_in_mode,
        "torch suspends function modes during backward, where checkpointed layers run forward again",
    )


def _run_eagerly(log: RebindingLog) -> None:
    reason = "to compile megatron's fused functions for a CPU takes longer than all that tiny models do with them"
    frames = importlib.import_module("torch._dynamo.eval_frame")
    log.rebind(frames, "_stance", frames.DynamoStance("force_eager"), reason)


def _stand_in_for_packages(log: RebindingLog) -> None:
    transformer = "megatron.core.transformer"
    mla = importlib.import_module(f"{transformer}.multi_latent_attention")
    users = [mla]
    absorbed = f"{transformer}.experimental_attention_variant.absorbed_mla"
    if importlib.util.find_spec(absorbed) is not None:  # from 0.17
        users.append(importlib.import_module(absorbed))
    # A patch may have put a module of its own there, whose classes look the name up in the first of these.
    for module in [user for user in users if "TELinear" in vars(user)]:
        log.rebind(
            module,
            "TELinear",
            DuplicatedLinear,
            "MLA gives only this class the arguments of a duplicated down projection",
        )
    if mla.HAVE_TE and importlib.util.find_spec("transformer_engine") is None:
        log.rebind(mla, "HAVE_TE", False, "0.16 takes the mock that replaces Transformer Engine for the package")

    from megatron.core.transformer.transformer_config import MLATransformerConfig

    dsa = importlib.import_module(f"{transformer}.experimental_attention_variant.dsa")
    if dsa.hadamard_transform is None:
        log.rebind(dsa, "hadamard_transform", hadamard_transform, "fast_hadamard_transform builds for CUDA only")
        if not hasattr(MLATransformerConfig, "dsa_indexer_rotate_activation"):
            log.rebind(
                dsa, "rotate_activation", rotate_activation, "before 0.19 no switch turns the bf16-only rotation off"
            )


class _CudaToCpu(TorchFunctionMode):
    """Sends literal ``"cuda"`` devices, ``pin_memory=True`` and ``.cuda()`` to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


class _NullStream:
    """A stream whose work is done."""

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> None: ...

    def synchronize(self) -> None: ...
