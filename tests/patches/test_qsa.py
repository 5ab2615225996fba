"""The patch `qsa`: its state on each release, what it changes and takes back, an upstream with the variant."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest

import mcore_patches
from mcore_patches.attention.qsa.config import FIELDS
from mcore_patches.overlay.patch import State
from mcore_patches.patches.qsa import PATCH
from tests import releases
from tests.overlay.isolation import call

SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
CONFIG = "megatron.core.transformer.transformer_config"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
TINY = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "attention_dropout": 0.0}
QSA = {**TINY, "experimental_attention_variant": "qsa", "qsa_indexer_n_heads": 2, "qsa_indexer_loss_coeff": 0.1}


@pytest.mark.parametrize("release", releases.RELEASES)
def test_applied_and_reverted(release: str) -> None:
    call(f"{__name__}:apply_use_revert", {"release": release}, f"before-{release}")


def apply_use_revert(release: str) -> None:
    row = mcore_patches.apply_patches("qsa", strict=True)["qsa"]
    assert row.state is State.PENDING
    assert {target.verdict for target in row.targets} == {"needs"}, release
    config_class = importlib.import_module(CONFIG).TransformerConfig
    specs, schedules = importlib.import_module(SPECS), importlib.import_module(SCHEDULES)
    importlib.import_module("megatron.core.transformer.multi_token_prediction")
    assert mcore_patches.status()["qsa"].state is State.APPLIED

    config = config_class(**QSA)
    with pytest.raises(ValueError, match="qsa_indexer_kv_heads=3"):
        config_class(**QSA, qsa_indexer_kv_heads=3)
    backend = importlib.import_module("megatron.core.models.backends").LocalSpecProvider()
    spec = specs.get_experimental_attention_variant_module_spec(config, backend)
    assert spec.module.__name__ == "QSASelfAttention"
    plain = config_class(**TINY)
    plain.experimental_attention_variant = "other"
    with pytest.raises(ValueError, match="Invalid experimental attention variant: other"):
        specs.get_experimental_attention_variant_module_spec(plain, backend)

    row = mcore_patches.revert("qsa")["qsa"]
    assert row.state is State.NOT_APPLIED
    assert not {field.name for field in FIELDS} & set(config_class.__dataclass_fields__)
    with pytest.raises(TypeError, match="qsa_indexer_n_heads"):
        config_class(**QSA)
    with pytest.raises(ValueError, match="Invalid experimental attention variant: qsa"):
        specs.get_experimental_attention_variant_module_spec(config, backend)
    for function in (
        specs.get_experimental_attention_variant_module_spec,
        specs._get_self_attention_module_spec,
        schedules.forward_step_calc_loss,
        config_class.__post_init__,
        importlib.import_module("megatron.core.transformer.attention").SelfAttention.__init__,
    ):
        assert "mcore_patches" not in function.__code__.co_filename
    assert mcore_patches.apply_patches("qsa", strict=True)["qsa"].state is State.APPLIED
    config_class(**QSA)


def test_descriptor_loads_neither_torch_nor_megatron() -> None:
    call(f"{__name__}:no_heavy_import", {})


def no_heavy_import() -> None:
    importlib.import_module("mcore_patches.patches.qsa")
    importlib.import_module("mcore_patches.attention.qsa")
    assert not {"torch", "megatron"} & set(sys.modules)


@pytest.fixture(params=releases.RELEASES)
def changed_release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a release to edit; files are shared with the original until they are replaced."""
    source = releases.path(request.param)
    shutil.copytree(
        source / "megatron", tmp_path / "megatron", copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path


def _edit(folder: Path, module: str, old: str, new: str) -> None:
    path = folder / (module.replace(".", "/") + ".py")
    text = path.read_text()
    assert old in text
    path.unlink()
    path.write_text(text.replace(old, new, 1))


def state_and_messages(folder: Path) -> tuple[State, str, str, bool]:
    """In a process that sees the edited release: state, reason, what was logged, whether megatron was changed."""
    sys.path.insert(0, str(folder))
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("mcore_patches").addHandler(handler)
    row = mcore_patches.apply_patches("qsa")["qsa"]
    config_class = importlib.import_module(CONFIG).TransformerConfig
    function = importlib.import_module(SPECS).get_experimental_attention_variant_module_spec
    changed = "qsa_stage" in config_class.__dataclass_fields__ or "mcore_patches" in function.__code__.co_filename
    return row.state, row.reason, "\n".join(records), changed


def test_steps_aside_once_upstream_has_the_variant(changed_release: Path) -> None:
    first = '    if config.experimental_attention_variant == "gated_delta_net":\n        return get_gated'
    theirs = '    if config.experimental_attention_variant == "qsa":\n        return None\n'
    _edit(changed_release, SPECS, first, theirs + first)
    state, reason, logged, changed = call(f"{__name__}:state_and_messages", {"folder": changed_release}, "torch")
    assert state is State.UPSTREAM_FIXED
    assert "get_experimental_attention_variant_module_spec knows the variant 'qsa'" in reason
    assert "WARNING" in logged
    assert not changed


def test_steps_aside_for_fields_of_upstream(changed_release: Path) -> None:
    _edit(
        changed_release,
        CONFIG,
        "    experimental_attention_variant: Optional[Literal['gated_delta_net', 'dsa']] = None\n",
        "    experimental_attention_variant: Optional[Literal['gated_delta_net', 'dsa', 'qsa']] = None\n"
        "    qsa_block_topk: int = 512\n",
    )
    _edit(changed_release, CONFIG, "        super().__post_init__()\n", "        super().__post_init__()  # also qsa\n")
    state, reason, _, changed = call(f"{__name__}:state_and_messages", {"folder": changed_release}, "torch")
    assert state is State.UPSTREAM_FIXED
    assert "fields of its own for it: qsa_block_topk" in reason
    assert not changed


def test_leaves_text_alone_that_it_does_not_know(changed_release: Path) -> None:
    _edit(changed_release, SCHEDULES, '"""Calculate the loss and number of tokens', '"""Calculate loss and tokens')
    state, reason, _, changed = call(f"{__name__}:state_and_messages", {"folder": changed_release}, "torch")
    assert state is State.DRIFTED
    assert "forward_step_calc_loss" in reason
    assert "no variant 'qsa' and no qsa_* fields of upstream's" in reason
    assert not changed


def test_targets_are_known_on_every_release() -> None:
    assert PATCH.releases.__contains__((0, 16, 1))
    assert all(tuple(map(int, release.split("."))) in PATCH.releases for release in releases.RELEASES)
