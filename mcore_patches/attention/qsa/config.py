"""The settings of QSA as fields of megatron's `TransformerConfig`, and what a config with them must satisfy.

Imports neither torch nor megatron: the patch descriptor reads `FIELDS` before either is loaded.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from mcore_patches.attention.qsa.support import Setup, refusal

VARIANT = "qsa"
# Megatron-LM after 0.19 calls the first "gdn", and has a second kind.
MIXED_VARIANTS = ("gated_delta_net", "gdn", "gdn2")
STAGES = ("frozen", "warmup", "sparse")
REDUCTIONS = ("mean", "sum")


class ConfigField(NamedTuple):
    """A field that `TransformerConfig` gains. type: as an annotation would say it; meaning: one line for users."""

    name: str
    type: Any
    default: Any
    meaning: str


FIELDS = (
    ConfigField(
        "qsa_indexer_n_heads",
        int | None,
        None,
        "query heads of the indexer; None is no QSA",
    ),
    ConfigField("qsa_indexer_kv_heads", int, 1, "key heads of the indexer, 1"),
    ConfigField("qsa_indexer_head_dim", int, 128, "channels of an index head"),
    ConfigField("qsa_indexer_budget", int, 2048, "tokens in the blocks that a query selects"),
    ConfigField("qsa_indexer_compress_ratio", int, 4, "tokens in a block"),
    ConfigField(
        "qsa_indexer_loss_coeff",
        float | None,
        None,
        "factor on the indexer's loss, above 0; required by the stages 'warmup' and 'sparse'",
    ),
    ConfigField(
        "qsa_indexer_loss_reduction",
        Literal["mean", "sum"],
        "mean",
        "the indexer's loss of a microbatch: its mean or its sum over valid tokens (masked prompts included, padding "
        "of packed documents not). With `calculate_per_token_loss`: the batch's sum over the number of tokens that the "
        "main loss counts, as megatron divides every gradient; above the mean where prompts are masked",
    ),
    ConfigField(
        "qsa_indexer_detach_input",
        bool,
        True,
        "whether the indexer's loss stops at the indexer; False lets it reach the layers below",
    ),
    ConfigField(
        "qsa_stage",
        Literal["frozen", "warmup", "sparse"],
        "sparse",
        "'frozen': sparse attention, the indexer does not train. 'warmup': dense attention, only the indexer trains. "
        "'sparse': sparse attention, everything trains",
    ),
)


def fields_markdown() -> str:
    """The table of fields for the README."""
    lines = ["| field | default | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{field.name}` | `{field.default!r}` | {field.meaning} |" for field in FIELDS]
    return "\n".join(lines)


def uses_qsa(config: Any) -> bool:
    """Whether a config asks for QSA, in every layer (variant "qsa") or in those beside gated delta nets."""
    if getattr(config, "qsa_indexer_n_heads", None) is not None:
        return True
    # Schedules also run models whose config is a ModelParallelConfig, which has no attention.
    return getattr(config, "experimental_attention_variant", None) == VARIANT


def is_mixed(config: Any) -> bool:
    """Whether QSA is to be the standard attention beside gated delta nets."""
    return config.experimental_attention_variant in MIXED_VARIANTS and uses_qsa(config)


def trains_indexer(config: Any) -> bool:
    return config.qsa_stage != "frozen"


def blocks_per_query(config: Any) -> int:
    return config.qsa_indexer_budget // config.qsa_indexer_compress_ratio


def validate(config: Any) -> None:
    """Check a finished `TransformerConfig`. If it does not use QSA, its QSA fields must be at their defaults.

    Raises:
        ValueError: the first fault: the field, its value and what is allowed.
    """
    if not uses_qsa(config):
        _check_unused(config)
        return
    _check_variant(config)
    for name, least in (("n_heads", 1), ("kv_heads", 1), ("head_dim", 2), ("budget", 1), ("compress_ratio", 1)):
        _check_int(config, f"qsa_indexer_{name}", least)
    if config.qsa_indexer_kv_heads != 1:
        raise ValueError(f"qsa_indexer_kv_heads={config.qsa_indexer_kv_heads}: must be 1, QSA has one index key head")
    if config.qsa_indexer_head_dim % 2:
        raise ValueError(f"qsa_indexer_head_dim={config.qsa_indexer_head_dim}: must be even for rotary embeddings")
    if config.qsa_indexer_budget % config.qsa_indexer_compress_ratio:
        raise ValueError(
            f"qsa_indexer_budget={config.qsa_indexer_budget}: must be a multiple of "
            f"qsa_indexer_compress_ratio={config.qsa_indexer_compress_ratio}, the budget being whole blocks"
        )
    if config.num_attention_heads % config.num_query_groups:
        raise ValueError(
            f"num_query_groups={config.num_query_groups}: must divide num_attention_heads={config.num_attention_heads}"
        )
    _check_choice(config, "qsa_stage", STAGES)
    _check_choice(config, "qsa_indexer_loss_reduction", REDUCTIONS)
    if not isinstance(config.qsa_indexer_detach_input, bool):
        raise ValueError(f"qsa_indexer_detach_input={config.qsa_indexer_detach_input!r}: must be True or False")
    check_loss(config)
    refused = refusal(Setup(config))
    if refused:
        raise ValueError(refused)


def _check_unused(config: Any) -> None:
    for field in FIELDS:
        value = getattr(config, field.name, field.default)
        if value != field.default:
            raise ValueError(
                f"{field.name}={value!r} without qsa_indexer_n_heads, so that nothing would use it: set "
                f"qsa_indexer_n_heads and experimental_attention_variant, or leave it {field.default!r}"
            )


def _check_variant(config: Any) -> None:
    variant = config.experimental_attention_variant
    if config.qsa_indexer_n_heads is None:
        raise ValueError(
            "qsa_indexer_n_heads=None: experimental_attention_variant='qsa' needs the number of index heads"
        )
    if variant not in (VARIANT, *MIXED_VARIANTS):
        raise ValueError(
            f"qsa_indexer_n_heads={config.qsa_indexer_n_heads} with experimental_attention_variant={variant!r}: set "
            f"'{VARIANT}' for QSA in every layer or '{MIXED_VARIANTS[0]}' for QSA beside gated delta nets"
        )
    if variant == VARIANT and config.linear_attention_freq is not None:
        raise ValueError(
            f"linear_attention_freq={config.linear_attention_freq!r} with experimental_attention_variant='{VARIANT}', "
            f"which makes every layer a QSA layer: for a mix with gated delta nets set "
            f"experimental_attention_variant='{MIXED_VARIANTS[0]}' and keep qsa_indexer_n_heads"
        )


def check_loss(config: Any) -> None:
    """Raise ValueError if the stage and the settings of the loss do not fit together."""
    coeff = config.qsa_indexer_loss_coeff
    if not trains_indexer(config):
        if coeff is not None:
            raise ValueError(
                f"qsa_indexer_loss_coeff={coeff!r}: must be None with qsa_stage='frozen', which trains no loss"
            )
        return
    if isinstance(coeff, bool) or not isinstance(coeff, int | float) or not 0 < coeff < float("inf"):
        raise ValueError(
            f"qsa_indexer_loss_coeff={coeff!r}: qsa_stage='{config.qsa_stage}' trains the indexer and needs a finite "
            f"factor above 0 on its loss (in use elsewhere: 0.01 to 1.0)"
        )
    if config.qsa_indexer_loss_reduction == "sum" and config.calculate_per_token_loss:
        raise ValueError(
            "qsa_indexer_loss_reduction='sum' with calculate_per_token_loss=True: megatron then divides every gradient "
            "by the number of tokens, set 'mean'"
        )


def _check_int(config: Any, name: str, least: int) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be an int of at least {least}")


def _check_choice(config: Any, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
