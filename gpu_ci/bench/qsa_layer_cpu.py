"""Memory and time of one QSA layer of Qwen3.8-Flash-Next, forward and backward, on a CPU.

    python -m gpu_ci.bench.qsa_layer_cpu [--tokens 16384] [--stage sparse] [--dtype bf16] [--save]

24 query and 2 KV heads of 256, hidden 2560, 4 index heads of 128, blocks of 4, budget 2048; one packed document. Memory
is what is resident of the whole process, torch and weights included: before the layer runs and at its peak. Took 7
minutes in fp32 with one thread.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

from gpu_ci.bench import results
from mcore_patches.cpu import parallel

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--stage", choices=("frozen", "warmup", "sparse"), default="sparse")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16")
    parser.add_argument("--save", action="store_true", help="write the figures to results.csv")
    options = parser.parse_args()
    with parallel.model_parallel():
        rows = run(options.tokens, options.stage, options.dtype)
    print(results.table(rows))
    if options.save:
        results.save(rows)


def run(tokens: int, stage: str, dtype: str) -> list[dict[str, str]]:
    import mcore_patches

    mcore_patches.apply_patches("qsa", strict=True)
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.spec_utils import build_module

    from mcore_patches.attention.qsa import freeze_backbone, get_qsa_module_spec_for_backend
    from mcore_patches.cpu.models import CpuBackend, gpt_config

    config = gpt_config(
        dtype,
        hidden_size=2560,
        num_attention_heads=24,
        num_query_groups=2,
        kv_channels=256,
        attention_output_gate=True,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        layernorm_epsilon=1e-6,
        experimental_attention_variant="qsa",
        qsa_indexer_n_heads=4,
        qsa_indexer_loss_coeff=None if stage == "frozen" else 1.0,
        qsa_stage=stage,
    )
    layer = build_module(get_qsa_module_spec_for_backend(config, CpuBackend()), config=config, layer_number=1)
    if stage == "warmup":
        freeze_backbone(layer)
    table = RotaryEmbedding(256, 0.25, rotary_base=10_000_000, use_cpu_initialization=True)(tokens, packed_seq=True)
    bounds = torch.tensor([0, tokens], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=tokens, max_seqlen_kv=tokens)
    hidden = torch.randn(tokens, 1, 2560, dtype=_DTYPES[dtype], requires_grad=True)
    before = _peak_bytes()
    started = time.perf_counter()
    out, _ = layer(hidden, None, rotary_pos_emb=table, packed_seq_params=packed)
    forward = time.perf_counter()
    out.backward(torch.randn_like(out))
    ended = time.perf_counter()
    figures = {
        "resident before": (before / 2**30, "GiB"),
        "peak resident, forward and backward": (_peak_bytes() / 2**30, "GiB"),
    }
    # Not saved: they say more of what else the machine did than of the layer.
    print(f"forward {forward - started:.0f} s, backward {ended - forward:.0f} s, {torch.get_num_threads()} threads")
    case = f"T{tokens}-{stage}-{dtype}"
    # It runs there wherever it is started.
    return [
        results.row("qsa_layer_cpu", case, metric, value, unit) | {"device": "CPU"}
        for metric, (value, unit) in figures.items()
    ]


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
