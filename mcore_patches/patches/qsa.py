"""qsa: the attention variant "qsa" (Qwen Sparse Attention of Qwen3.8-Flash-Next), trainable.

Adds to `TransformerConfig` the fields of `attention.qsa.config.FIELDS`, checked at construction; lets megatron's spec
functions for experimental variants return QSA layers, in every layer (variant "qsa") or in the standard layers beside
gated delta nets (variant "gated_delta_net" with qsa_indexer_n_heads); refuses megatron's own self-attention where the
config asks for QSA; and tells the layers how the schedules scale the main loss. The layers themselves are in
`mcore_patches.attention.qsa`. Upstream: NVIDIA/Megatron-LM#7060, with the open changes #7234 and #7553.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from mcore_patches.attention.qsa.config import FIELDS, VARIANT, is_mixed, uses_qsa, validate
from mcore_patches.overlay.patch import Below, ConfigField, FieldsTarget, Finding, Patch, Probing, Target
from mcore_patches.overlay.versions import Releases

_CONFIG = "megatron.core.transformer.transformer_config"
_LAYERS = "mcore_patches.attention.qsa.attention"
_SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"


def build_validation(below: Below) -> Callable[..., None]:
    def __post_init__(self: Any) -> None:
        below.call(self)
        validate(self)

    return __post_init__


def build_variant_spec(below: Below) -> Callable[..., Any]:
    from mcore_patches.attention.qsa.telemetry import count_in

    count_in(below.counters)

    def get_experimental_attention_variant_module_spec(config: Any, backend: Any = None) -> Any:
        if config.experimental_attention_variant != VARIANT:
            return below.call(config, backend)
        return _qsa_spec(config, backend, below)

    return get_experimental_attention_variant_module_spec


def build_standard_spec(below: Below) -> Callable[..., Any]:
    def _get_self_attention_module_spec(config: Any, backend: Any = None) -> Any:
        if not is_mixed(config):
            return below.call(config, backend)
        return _qsa_spec(config, backend, below)

    return _get_self_attention_module_spec


def _qsa_spec(config: Any, backend: Any, below: Below) -> Any:
    from mcore_patches.attention.qsa.spec import get_qsa_module_spec_for_backend

    if backend is None:
        backend = below.module._get_backend_spec_provider(config=config)
    return get_qsa_module_spec_for_backend(config, backend)


def build_self_attention(below: Below) -> Callable[..., None]:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if uses_qsa(config):
            from mcore_patches.attention.qsa.spec import check_is_qsa

            check_is_qsa(self, config)
        below.call(self, config, *args, **kwargs)

    return __init__


def build_loss_scale(below: Below) -> Callable[..., Any]:
    def forward_step_calc_loss(
        model: Any,
        output_tensor: Any,
        loss_func: Any,
        config: Any,
        vp_stage: Any,
        collect_non_loss_data: Any,
        num_microbatches: int,
        *rest: Any,
        **options: Any,
    ) -> Any:
        # A model of several may hold QSA layers while the schedule is given another config.
        if uses_qsa(config) or _LAYERS in sys.modules:
            from mcore_patches.attention.qsa.schedule import after_forward

            after_forward(model, output_tensor, config, num_microbatches)
        return below.call(
            model, output_tensor, loss_func, config, vp_stage, collect_non_loss_data, num_microbatches, *rest, **options
        )

    return forward_step_calc_loss


def build_mtp_layer(below: Below) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        below.call(self, *args, **kwargs)
        if uses_qsa(self.config):
            from mcore_patches.attention.qsa.routes import qsa_layers

            # Inside an MTP layer numbering starts again at 1.
            for layer in qsa_layers(self):
                layer.global_layer_number = self.config.num_layers + self.layer_number

    return __init__


def probe(probing: Probing) -> Finding:
    """Whether text that is not known has a variant "qsa" of its own: a constant of the spec function, or fields."""
    specs = probing.originals[f"{_SPECS}:get_experimental_attention_variant_module_spec"]
    if VARIANT in _constants(specs.__code__):
        return Finding(True, f"get_experimental_attention_variant_module_spec knows the variant {VARIANT!r}")
    added = {field.name for field in FIELDS}
    config = probing.originals[f"{_CONFIG}:TransformerConfig+fields"]
    own = [name for name in config.__dataclass_fields__ if name.startswith("qsa_") and name not in added]
    if own:
        return Finding(True, f"TransformerConfig has fields of its own for it: {', '.join(own)}")
    return Finding(False, f"no variant {VARIANT!r} and no qsa_* fields of upstream's")


def _constants(code: CodeType) -> Iterator[Any]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        elif isinstance(constant, tuple | frozenset):
            yield from constant
        else:
            yield constant


PATCH = Patch(
    id="qsa",
    summary='the trainable attention variant "qsa" (Qwen Sparse Attention)',
    upstream="NVIDIA/Megatron-LM#7060",
    delete_when='the pinned release has a variant "qsa" that trains the indexer: status() says UPSTREAM_FIXED',
    releases=Releases((0, 16, 1), (0, 20, 0)),
    # Models that are built already have no QSA layers to reach.
    late_safe=True,
    probe=probe,
    targets=(
        FieldsTarget(
            modules=(_CONFIG,),
            qualname="TransformerConfig",
            fields=tuple(ConfigField(field.name, field.type, field.default) for field in FIELDS),
        ),
        Target(
            modules=(_CONFIG,),
            qualname="TransformerConfig.__post_init__",
            build=build_validation,
            known={
                "37ee0832a67f62ff170c7cf35e8aeab75b792cb9deab651a8af6ec9faa1ff3dc": "needs",  # 0.16.1
                "6197f18ce1c0b944df58c996a809fdb5fd74f704a66cc458f2c640eac43110c7": "needs",  # main at 1dcf0da
                "0beba67dae7025bcc42fbd139f9fd38f8456c2902a6010d1d807ecc8f95590be": "needs",  # 0.17.1
                "fda3defa5541a9382e141801cd98158476334d637f66e3e6ae240d51f909d162": "needs",  # 0.18.2
                "17c48b9e9c6b95f6719261f7ceb1df87d4761ca4a9d350682e6ff0de3793989c": "needs",  # 0.19.0, 0.19.2
                "9eae9dafb1a1cf0c061d7ccb40fc6f640306cb8d07b5868e64ae62a17aba5477": "needs",  # main at 71e418e
                "fd3567c33be187f8ffb664215e47f9a1eb4ad6ad926bbd428b27ec4f7079f749": "needs",  # main at 14346b6
                "b3d8b0afc483829f4c3c80b8849bdcadbda38036e30da8fbc4ff6ee707d53ac2": "needs",  # main at 2a75ac1
                "ed6e920eeef56c58a8ab21b494813180de228d9de6fff007c3f1b9c74c6c9395": "needs",  # main at d98e8a6
            },
        ),
        Target(
            modules=(_SPECS,),
            qualname="get_experimental_attention_variant_module_spec",
            build=build_variant_spec,
            known={
                "9c7d5b583e70df0d2a06a599de2c137503888a9c8e5b23aa11bdeb24b7aa8883": "needs",  # 0.16.1, 0.17.1
                "34e7c353aa357d93c39cf1623e42c5602d4057e8b5ee7c71bd5e46a1a65cf1ce": "needs",  # 0.18.2 to 0.19.2
                "5721dc2ba0fdc8d270e6ea1a367d61633783f27b95b677e0f9f1db875c5843ac": "needs",  # main, 14346b6 to d98e8a6
            },
        ),
        Target(
            modules=(_SPECS,),
            qualname="_get_self_attention_module_spec",
            build=build_standard_spec,
            known={
                "bcff51105ca3c94c0ea6d141c066caaa7228f3e3c13d2c47b1ce077b5c7abcc7": "needs",  # 0.16.1
                "3615acfc7f05639117f5f9329b5ff166c1f96ab63ffb25cdede93fd7fdb8770b": "needs",  # main at 1dcf0da
                "f2d065bc6cf0b9653073778959df7e2903633fc935cb0cb0bd876e712b104c21": "needs",  # 0.17.1 to 0.19.2
            },
        ),
        Target(
            modules=("megatron.core.transformer.attention",),
            qualname="SelfAttention.__init__",
            build=build_self_attention,
            known={
                "8cb66e5624cd54f9c9b9e2f8feb1c30a3850ab9af543ae676a20956aab844eba": "needs",  # 0.16.1, main at 1dcf0da
                "330316f0114b5aaa94619015b7fe91474b42198629befe5c93a1463100ced5a0": "needs",  # 0.17.1
                # 0.18.2 to 0.19.2, main at 71e418e
                "5935fdafc9da2c9470be8b0828a363c213dfc2cf96a507541a8e17f37bd039b3": "needs",
                "242bb19af4b8b4198a981e98dd26e7a9a17133ffc8f49193c3809f0339c9618e": "needs",  # main, 14346b6 to d98e8a6
            },
        ),
        Target(
            modules=("megatron.core.pipeline_parallel.schedules",),
            qualname="forward_step_calc_loss",
            build=build_loss_scale,
            known={
                "30b0a6fbae0c48c2370a74b64c1f34fea5f3efc66c07bbe2991ff9ed6e064d61": "needs",  # 0.16.1
                "691c6139359a9f11997c25d649d1ad1f3498921911d6eb4e8b326e32847f2f27": "needs",  # main at 1dcf0da
                "b742b1365a4114b5d7e6004f25f477d6308f1dbf0162a839bafa4abbf399706d": "needs",  # 0.17.1
                "1cb53e7f6f5a41f9cefc3599251a849b20721d9ed28054aa2ad82acc437581de": "needs",  # 0.18.2
                "646674f2714f450217b542fcf2898fcdcfbcd5dbfac7eb4e203b07a3f1e09c13": "needs",  # main at 71e418e
                "21c1cab8a4c55482fcf67685f6d0744e2906f0b734cdaf8981d3a09f6743379d": "needs",  # 0.19.0, 0.19.2
            },
        ),
        Target(
            modules=("megatron.core.transformer.multi_token_prediction",),
            qualname="MultiTokenPredictionLayer.__init__",
            build=build_mtp_layer,
            known={
                "09a6a825ef19c184c22b2003e79ad93cdb794da7a74d843f8839d9d8a990c592": "needs",  # 0.16.1
                "f49ba49b5701275aa375d5ae05a8275e77ae9e7e7a6353a8514401fda52ae4b5": "needs",  # 0.17.1
                "c2ba75e796aefa47c3921acf10227448604e307563366a3691a5e0805c25e5eb": "needs",  # 0.18.2 to 0.19.2
                "1b0f07519ae5279cf3e1cfecbe59eab245cab1e91cc8bdc492f1516616a8ffed": "needs",  # main, 14346b6 to d98e8a6
            },
        ),
    ),
)
