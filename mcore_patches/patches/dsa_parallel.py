"""dsa_parallel: DSA as megatron-core 0.19 has it, on 0.16 to 0.18, for configs that opt in.

Adds the fields of `attention.dsa.config.FIELDS`, checked at construction, and lifts the release's refusal of context
parallelism; lets megatron's spec functions return the layers of `mcore_patches.attention.dsa`; refuses megatron's own
attention where the config opts in; and tells the layers how the schedules scale the main loss. A config that does not
opt in (`dsa_kernel_backend="none"`) gets what the release gives. Upstream: NVIDIA/Megatron-LM#3674, landed as #5243 to
#5246, #5099 and #5049.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from mcore_patches.attention.dsa.config import FIELDS, VARIANT, uses_dsa, validate
from mcore_patches.overlay.patch import Below, ConfigField, FieldsTarget, Finding, Patch, Probing, Target
from mcore_patches.overlay.versions import Releases

_CONFIG = "megatron.core.transformer.transformer_config"
_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
_LAYERS = "mcore_patches.attention.dsa.core"
_SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
# Text that 0.18 and 0.19 share is told apart by the attention that it leads to.
_ATTENTION = f"{_DSA}:DSAttention.forward"


def build_validation(below: Below) -> Callable[..., None]:
    def __post_init__(self: Any) -> None:
        hidden = uses_dsa(self)
        if hidden:
            # The release knows that its own DSA has no context parallelism.
            self.experimental_attention_variant = None
        try:
            below.call(self)
        finally:
            if hidden:
                self.experimental_attention_variant = VARIANT
        validate(self)

    return __post_init__


def build_variant_spec(below: Below) -> Callable[..., Any]:
    _count(below)

    def get_experimental_attention_variant_module_spec(config: Any, backend: Any = None) -> Any:
        return _dsa_spec(config, backend, below) if uses_dsa(config) else below.call(config, backend)

    return get_experimental_attention_variant_module_spec


def build_dsa_spec(below: Below) -> Callable[..., Any]:
    def get_dsa_module_spec_for_backend(config: Any, backend: Any = None) -> Any:
        return _dsa_spec(config, backend, below) if uses_dsa(config) else below.call(config, backend)

    return get_dsa_module_spec_for_backend


def _dsa_spec(config: Any, backend: Any, below: Below) -> Any:
    from mcore_patches.attention.dsa.spec import get_dsa_module_spec_for_backend

    if backend is None:
        backend = below.module._get_backend_spec_provider(config=config)
    return get_dsa_module_spec_for_backend(config, backend)


def _count(below: Below) -> None:
    from mcore_patches.attention.dsa.telemetry import count_in

    count_in(below.counters)


def build_mla(below: Below) -> Callable[..., None]:
    return _refuse_others(below, uses_dsa)


def build_self_attention(below: Below) -> Callable[..., None]:
    # Hybrid stacks have layers of it beside those with DSA.
    return _refuse_others(below, lambda config: uses_dsa(config) and not config.is_hybrid_model)


def _refuse_others(below: Below, asked: Callable[[Any], bool]) -> Callable[..., None]:
    """An ``__init__`` that refuses layers other than this package's where `asked` says so of the config."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if asked(config):
            from mcore_patches.attention.dsa.spec import check_is_dsa

            check_is_dsa(self, config)
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
        asked = getattr(config, "experimental_attention_variant_loss_scale_func", None) is not None
        # A model of several may hold DSA layers while the schedule is given another config.
        if asked or uses_dsa(config) or _LAYERS in sys.modules:
            from mcore_patches.attention.dsa.schedule import after_forward

            after_forward(model, output_tensor, config, num_microbatches)
        return below.call(
            model, output_tensor, loss_func, config, vp_stage, collect_non_loss_data, num_microbatches, *rest, **options
        )

    return forward_step_calc_loss


def build_mtp_layer(below: Below) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        below.call(self, *args, **kwargs)
        if uses_dsa(self.config):
            from mcore_patches.attention.dsa.schedule import dsa_layers

            # Inside an MTP layer numbering starts again at 1.
            for layer in dsa_layers(self):
                layer.global_layer_number = self.config.num_layers + self.layer_number

    return __init__


def probe(probing: Probing) -> Finding:
    """Whether text that is not known has DSA over absorbed latents with fused kernels of its own."""
    config = probing.originals[f"{_CONFIG}:TransformerConfig+fields"]
    attention = vars(sys.modules[_DSA])["DSAttention"] if _DSA in sys.modules else None
    field = "dsa_kernel_backend" in config.__dataclass_fields__
    absorbed = attention is not None and "up_v_weight" in inspect.signature(attention.forward).parameters
    detail = (
        f"TransformerConfig has {'a' if field else 'no'} field dsa_kernel_backend of its own, and DSAttention.forward "
        f"{'takes' if absorbed else 'does not take'} up_v_weight"
    )
    return Finding(field and absorbed, detail)


PATCH = Patch(
    id="dsa_parallel",
    summary="0.19's DSA on older releases: context parallelism, packed documents, fused kernels, linear memory",
    upstream="NVIDIA/Megatron-LM#3674",
    delete_when="the pinned release is 0.19 or newer: status() says UPSTREAM_FIXED",
    note=(
        "nothing changes until a config of variant 'dsa' sets dsa_kernel_backend='tilelang'. Its indexer is then that "
        "of 0.19 (rotated channels first, pairs of halves, the normed query latent) and selects otherwise than this "
        "release's with the same weights: train on, or start, with either, but do not change from one to the other "
        "unaware"
    ),
    releases=Releases((0, 16, 1), (0, 19, 0)),
    # Models that are built already have none of these layers to reach.
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
            # Innermost: other patches' checks must see the variant.
            level=-1,
            known={
                "37ee0832a67f62ff170c7cf35e8aeab75b792cb9deab651a8af6ec9faa1ff3dc": "needs",  # 0.16.1
                "0beba67dae7025bcc42fbd139f9fd38f8456c2902a6010d1d807ecc8f95590be": "needs",  # 0.17.1
                "fda3defa5541a9382e141801cd98158476334d637f66e3e6ae240d51f909d162": "needs",  # 0.18.2
                "17c48b9e9c6b95f6719261f7ceb1df87d4761ca4a9d350682e6ff0de3793989c": "fixed",  # 0.19.0, 0.19.2
            },
        ),
        Target(
            modules=(_SPECS,),
            qualname="get_experimental_attention_variant_module_spec",
            build=build_variant_spec,
            relies_on=("get_dsa_module_spec_for_backend",),
            known={
                "132b93c2241347bf65732ee171e833fa7799df43dd91a43cd8f9742f6486a019": "needs",  # 0.16.1, 0.17.1
                "4795312fba204502bc091ecb1ac568101d647bfcb9e91b64e305595c36496d21": "needs",  # 0.18.2
                "ac2967de8280a9643dc61d5fb2919581cbd70e9af4d25b9c55bde1f83caf0075": "fixed",  # 0.19.0, 0.19.2
            },
        ),
        Target(
            modules=(_SPECS,),
            qualname="get_dsa_module_spec_for_backend",
            build=build_dsa_spec,
            known={
                "a217a7fec4a27d803e2fcfafc963c293b62808113b18e2abea1fdfc179399ba0": "needs",  # 0.16.1, 0.17.1
                "49c75df64e3917c912f1d61b1b7cbde28475fb2ae54c80c974171318ec701fa1": "needs",  # 0.18.2
                "276a2933f9be88cd5951789296f7f82e13d8af6287e838da08acbab76ff6cc60": "fixed",  # 0.19.0, 0.19.2
            },
        ),
        Target(
            modules=("megatron.core.transformer.multi_latent_attention",),
            qualname="MLASelfAttention.__init__",
            build=build_mla,
            relies_on=(_ATTENTION,),
            known={
                "74d6279da53d540ce6bd04b82441ccf18cbffa7a01379c251004c2b115001de9": "needs",  # 0.16.1
                "9f9589733918f9719744975cca38483b015874076575cea2389f8d3c7d7adaa5": "needs",  # 0.17.1
                "17e43ae1c1e601baa2f19a3301459bbcaef20c36d1bbb5d13ec1520fc7e8e488": "needs",  # 0.18.2
                "1373cd3134772dd74deb36336c446afc136786ddecfda688f657420eb3ea11eb": "fixed",  # 0.19.0, 0.19.2
            },
        ),
        Target(
            modules=("megatron.core.transformer.attention",),
            qualname="SelfAttention.__init__",
            build=build_self_attention,
            relies_on=(_ATTENTION,),
            known={
                "f6751b943a71159b2f8ae7508c370c83c9d581d4ec3af54139609f7e06bb443e": "needs",  # 0.16.1
                "7be59c0e99114e185296d83d7f04fe38e05371c9da346d7ef791bbae8ca0307f": "needs",  # 0.17.1
                "298bb77f045aca94d8b91981913a5f2a78ffcb188408ca2ff63c769a7d151177": "needs",  # 0.18.2
                "eceb2f5cd9f8d69fecff19d8bec6e28503d928a8813ac9747d34f995c46383f4": "fixed",  # 0.19.0, 0.19.2
            },
        ),
        Target(
            modules=("megatron.core.pipeline_parallel.schedules",),
            qualname="forward_step_calc_loss",
            build=build_loss_scale,
            known={
                "30b0a6fbae0c48c2370a74b64c1f34fea5f3efc66c07bbe2991ff9ed6e064d61": "needs",  # 0.16.1
                "b742b1365a4114b5d7e6004f25f477d6308f1dbf0162a839bafa4abbf399706d": "needs",  # 0.17.1
                "1cb53e7f6f5a41f9cefc3599251a849b20721d9ed28054aa2ad82acc437581de": "needs",  # 0.18.2
                "21c1cab8a4c55482fcf67685f6d0744e2906f0b734cdaf8981d3a09f6743379d": "fixed",  # 0.19.0, 0.19.2
            },
        ),
        Target(
            modules=("megatron.core.transformer.multi_token_prediction",),
            qualname="MultiTokenPredictionLayer.__init__",
            build=build_mtp_layer,
            relies_on=(_ATTENTION,),
            known={
                "fa6386181186cdb31c37e73cb015749f7239245b4e86bfb546fb458ce726684e": "needs",  # 0.16.1
                "f2572cc158fa7404a4c495f798dbddb9fa8fff02209c400dbdf3c7aff2aca00e": "needs",  # 0.17.1
                "fba9543d1e8789def066fb3275eb41b0ebb765f51932da5c846906bff7c8e793": "needs",  # 0.18.2
                "87af30cf43184144279121d88538d0cd48dd205d75d7cf914f1593f891a125b2": "fixed",  # 0.19.0, 0.19.2
            },
        ),
    ),
)
