"""absorbed_mla: a working AbsorbedMLASelfAttention, under megatron-core 0.19's name, for 0.16 to 0.18.

0.17 and 0.18 have a class of that name which nothing uses and which cannot run (it hands its core attention positional
arguments that none takes); 0.16 has none. The patch provides ours, `mcore_patches.attention.dsa.absorbed`, in their
place: combined up-projection of keys and values as in 0.19, so that checkpoints of plain MLA load, or a split one. No
model changes by it: layers use it whose spec names it. Upstream: NVIDIA/Megatron-LM#3193, completed in 0.19.
"""

from __future__ import annotations

from typing import Any

from mcore_patches.overlay.patch import Finding, ModuleTarget, Patch, Probing
from mcore_patches.overlay.versions import Releases

MODULE = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
NAMES = ("AbsorbedMLASelfAttention", "AbsorbedMLASelfAttentionSubmodules")


def probe(probing: Probing) -> Finding:
    """Whether text that is not known does what 0.19's does: one up-projection, and a core attention that is called."""
    (module,) = probing.modules.values()
    layer, submodules = (getattr(module, name, None) for name in NAMES)
    combined = "linear_kv_up_proj" in getattr(submodules, "__dataclass_fields__", ())
    called = _keyword_names(getattr(layer, "forward", None))
    passes = {"x", "qr", "up_v_weight"} <= called
    verbs = ["has" if combined else "lacks", "hands" if passes else "does not hand"]
    found = f"it {verbs[0]} linear_kv_up_proj and {verbs[1]} x, qr and up_v_weight to the core attention by name"
    return Finding(combined and passes, found)


def _keyword_names(function: Any) -> set[str]:
    """Names of keyword arguments in the calls that a function makes."""
    constants = getattr(getattr(function, "__code__", None), "co_consts", ())
    return {name for names in constants if isinstance(names, tuple) for name in names if isinstance(name, str)}


PATCH = Patch(
    id="absorbed_mla",
    summary="a working AbsorbedMLASelfAttention, for layers whose spec names it",
    upstream="NVIDIA/Megatron-LM#3193",
    delete_when="the pinned release is 0.19 or later: status() says UPSTREAM_FIXED",
    releases=Releases((0, 16, 1), (0, 19, 0)),
    # Layers that are built already are upstream's, which cannot run.
    late_safe=True,
    probe=probe,
    targets=(
        ModuleTarget(
            modules=(MODULE,),
            provider="mcore_patches.attention.dsa",
            names=NAMES,
            known={
                "71a2b0c952d012bf7595bf4141250caee2694059f6374c3bd9977a7a3b43792a": "needs",  # 0.17.1
                "c14a21a3fa7a3653e2eddbecf4beedf0536a62b01b4f7195313ee53b1aa952da": "needs",  # 0.18.2
                "9865c4231b04476407867eebcbce95fed9e76d3e5803a126f476f1602c0576be": "fixed",  # 0.19.0, 0.19.2
            },
        ),
    ),
)
