"""The patch `dsa_parallel`: its state on each release, what it changes and takes back, what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import mcore_patches
from mcore_patches.attention.dsa.config import FIELDS
from mcore_patches.attention.dsa.support import refusal
from mcore_patches.overlay.patch import State
from mcore_patches.patches.dsa_parallel import PATCH
from tests import releases
from tests.overlay.isolation import call

SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
CONFIG = "megatron.core.transformer.transformer_config"
DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
OLDER = [release for release in releases.RELEASES if not releases.at_least(release, "0.19.0")]
NEWER = [release for release in releases.RELEASES if releases.at_least(release, "0.19.0")]
PLAIN = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
    "apply_rope_fusion": False,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 4,
    "dsa_indexer_loss_coeff": 0.1,
}
OPT_IN = {"dsa_kernel_backend": "tilelang", "dsa_indexer_rotate_activation": False}

# (what is set, what the error says)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dsa_kernel_backend": "triton"}, r"dsa_kernel_backend='triton': must be one of 'none', 'tilelang', 'cudnn'"),
    ({"dsa_kernel_backend": "cudnn"}, r"dsa_kernel_backend='cudnn': its kernels come with megatron-core 0\.19"),
    ({"dsa_kernel_backend": "none"}, r"dsa_indexer_rotate_activation=False with dsa_kernel_backend='none'"),
    (
        {"experimental_attention_variant": None},
        r"dsa_kernel_backend='tilelang' with experimental_attention_variant=None, so that nothing would use it",
    ),
    (
        {"experimental_attention_variant": None, "dsa_kernel_backend": "tilelnag"},
        r"dsa_kernel_backend='tilelnag': must be one of",
    ),
    ({"dsa_indexer_use_sparse_loss": "yes"}, r"dsa_indexer_use_sparse_loss='yes': must be True or False"),
    (
        {"experimental_attention_variant_loss_scale_func": 5},
        r"experimental_attention_variant_loss_scale_func=5: must be None or a function",
    ),
    ({"qk_pos_emb_head_dim": 3}, r"qk_pos_emb_head_dim=3: must be even"),
    ({"dsa_indexer_n_heads": None}, r"dsa_indexer_n_heads=None: must be an int of at least 1"),
    ({"dsa_indexer_topk": 0}, r"dsa_indexer_topk=0: must be an int of at least 1"),
    ({"dsa_indexer_topk_freq": 0}, r"dsa_indexer_topk_freq=0: must be an int of at least 1"),
    ({"dsa_indexer_skip_topk_offset": -1}, r"dsa_indexer_skip_topk_offset=-1: must be an int of at least 0"),
    ({"dsa_indexer_head_dim": 2}, r"dsa_indexer_head_dim=2: must be at least qk_pos_emb_head_dim=4"),
    ({"dsa_indexer_scoring_relu": 1}, r"dsa_indexer_scoring_relu=1: must be True or False"),
    ({"dsa_indexer_loss_coeff": -1.0}, r"dsa_indexer_loss_coeff=-1\.0: must be None or a finite number"),
    ({"dsa_indexer_k_norm_epsilon": float("nan")}, r"dsa_indexer_k_norm_epsilon=nan: must be None or a finite number"),
    ({"dsa_indexer_rotate_activation": True}, r"dsa_indexer_rotate_activation=True: the Hadamard rotation takes bf16"),
    ({"attention_dropout": 0.1}, r"does not support attention dropout: .*set attention_dropout=0"),
    ({"add_bias_linear": True}, r"does not support linear layers with a bias: .*add_bias_linear=False"),
    ({"apply_rope_fusion": True, "rope_type": "yarn"}, r"does not support fused rotary embedding: .*apply_rope_fusion"),
    (
        {"tensor_model_parallel_size": 2},
        r"does not support tensor parallelism without sequence parallelism: .*sequence_parallel=True",
    ),
    (
        {"context_parallel_size": 2, "cp_comm_type": "p2p"},
        r"does not support context parallelism other than all-gather: .*cp_comm_type=None or 'allgather'",
    ),
    ({"window_size": (4, 0)}, r"does not support sliding windows"),
    ({"softmax_type": "off-by-one"}, r"does not support attention sinks"),
    ({"cache_mla_latents": True}, r"does not support inference-optimised layers: .*cache_mla_latents=False"),
]


@pytest.mark.parametrize("release", OLDER)
def test_applied_and_reverted(release: str) -> None:
    call(f"{__name__}:apply_use_revert", {"release": release}, f"before-{release}")


def apply_use_revert(release: str) -> None:
    row = mcore_patches.apply_patches("dsa_parallel", strict=True)["dsa_parallel"]
    assert row.state is State.PENDING
    assert {target.verdict for target in row.targets} == {"needs"}, release
    assert "dsa_kernel_backend='tilelang'" in row.note
    config_class = importlib.import_module(CONFIG).MLATransformerConfig
    for target in row.targets:
        importlib.import_module(target.name.partition(":")[0])
    report = mcore_patches.status()
    assert report["dsa_parallel"].state is State.APPLIED
    assert "    note: nothing changes until a config of variant 'dsa' sets" in str(report)

    _fields(config_class)
    _opt_in_is_checked(config_class)
    _without_the_opt_in(config_class, release)

    row = mcore_patches.revert("dsa_parallel")["dsa_parallel"]
    assert row.state is State.NOT_APPLIED
    assert row.note == ""
    assert not {field.name for field in FIELDS} & set(config_class.__dataclass_fields__)
    with pytest.raises(TypeError, match="dsa_kernel_backend"):
        config_class(**PLAIN, **OPT_IN)
    for target in PATCH.targets[1:]:
        function: Any = importlib.import_module(target.modules[0])
        for name in target.qualname.split("."):
            function = getattr(function, name)
        assert "mcore_patches" not in function.__code__.co_filename, target.qualname
    assert mcore_patches.apply_patches("dsa_parallel", strict=True)["dsa_parallel"].state is State.APPLIED
    config_class(**PLAIN, **OPT_IN)


def _fields(config_class: Any) -> None:
    config = config_class(**PLAIN, **OPT_IN)
    assert config.experimental_attention_variant == "dsa"
    assert config.dsa_indexer_scoring_relu is True
    again = dataclasses.replace(config, dsa_indexer_topk_freq=2, num_layers=2)
    assert (again.dsa_kernel_backend, again.dsa_indexer_topk_freq) == ("tilelang", 2)
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert [getattr(same, field.name) for field in FIELDS] == [getattr(config, field.name) for field in FIELDS]
    parallel = config_class(**PLAIN, **OPT_IN, context_parallel_size=2, cp_comm_type="all_gather")
    assert parallel.context_parallel_size == 2


def _opt_in_is_checked(config_class: Any) -> None:
    for settings, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            config_class(**{**PLAIN, **OPT_IN, **settings})
    # Upstream demands half a dozen other settings for it.
    delayed = config_class(**PLAIN, **OPT_IN)
    delayed.delay_wgrad_compute = True
    assert "does not support delayed weight gradients" in (refusal(delayed) or "")
    # Upstream's own check still runs, and leaves the variant in place.
    odd = {"num_attention_heads": 3, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    with pytest.raises(ValueError, match=r"num_attention_heads \(3\) must be a multiple of"):
        config_class(**{**PLAIN, **OPT_IN, **odd})


def _without_the_opt_in(config_class: Any, release: str) -> None:
    """What the release does by itself."""
    specs = importlib.import_module(SPECS)
    backend = importlib.import_module("megatron.core.models.backends").LocalSpecProvider
    plain = config_class(**PLAIN)
    # The local backend has no duplicated linear layer.
    backend = type("Backend", (backend,), {"linear": lambda self: self.column_parallel_linear()})()
    assert specs.get_dsa_module_spec_for_backend(plain, backend).module.__name__ == "MLASelfAttention"
    if releases.at_least(release, "0.18.2"):
        spec = specs.get_experimental_attention_variant_module_spec(plain, backend)
        assert spec.submodules.core_attention.module is importlib.import_module(DSA).DSAttention
    else:
        with pytest.raises(ValueError, match="Invalid experimental attention variant: dsa"):
            specs.get_experimental_attention_variant_module_spec(plain, backend)
    with pytest.raises(AssertionError, match="context parallelism is not supported by DSAttention"):
        config_class(**PLAIN, context_parallel_size=2)
    opted_in = specs.get_experimental_attention_variant_module_spec(config_class(**PLAIN, **OPT_IN), backend)
    assert opted_in.module.__name__ == "AbsorbedMLASelfAttention"
    assert opted_in.metainfo == {"fuse_input_layernorm": False}


@pytest.mark.parametrize("release", NEWER)
def test_steps_aside_for_upstream(release: str) -> None:
    call(f"{__name__}:upstream_has_it", {}, f"before-{release}")


def upstream_has_it() -> None:
    row = mcore_patches.apply_patches("dsa_parallel", strict=True)["dsa_parallel"]
    assert row.state is State.UPSTREAM_FIXED, row.reason
    assert row.note == ""
    assert not any(name.partition(".")[0] == "megatron" and "transformer" in name for name in sys.modules)
    fields = importlib.import_module(CONFIG).TransformerConfig.__dataclass_fields__
    for field in FIELDS:
        assert fields[field.name].default == field.default, field.name


def test_descriptor_loads_neither_torch_nor_megatron() -> None:
    call(f"{__name__}:no_heavy_import", {})


def no_heavy_import() -> None:
    importlib.import_module("mcore_patches.patches.dsa_parallel")
    importlib.import_module("mcore_patches.attention.dsa")
    assert not {"torch", "megatron"} & set(sys.modules)


@pytest.mark.parametrize(
    ("release", "edited", "state"),
    [("0.18.2", "", State.DRIFTED), ("0.19.2", "", State.UPSTREAM_FIXED), ("0.19.2", "up_v_weight", State.DRIFTED)],
)
def test_unknown_text_is_probed(release: str, edited: str, state: State, tmp_path: Path) -> None:
    """A release with other text: upstream's if it has both the field and the latent attention, else left alone."""
    shutil.copytree(
        releases.path(release) / "megatron",
        tmp_path / "megatron",
        copy_function=os.link,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    module = tmp_path / "megatron/core/pipeline_parallel/schedules.py"
    _replace(module, '"""Calculate the loss and number of tokens', '"""Calculate loss and tokens')
    if edited:
        _replace(tmp_path / f"{DSA.replace('.', '/')}.py", "up_v_weight", "up_weight")
    found, reason, changed = call(f"{__name__}:state_and_reason", {"folder": tmp_path}, "torch")
    assert found is state, reason
    assert "dsa_kernel_backend of its own" in reason
    assert not changed


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.unlink()
    path.write_text(text.replace(old, new))


def state_and_reason(folder: Path) -> tuple[State, str, bool]:
    sys.path.insert(0, str(folder))
    row = mcore_patches.apply_patches("dsa_parallel")["dsa_parallel"]
    function = importlib.import_module(SPECS).get_experimental_attention_variant_module_spec
    return row.state, row.reason, "mcore_patches" in function.__code__.co_filename
