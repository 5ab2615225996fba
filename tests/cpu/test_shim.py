"""The shim is undone completely, before and after megatron's import, and refuses what would corrupt it."""

import pytest

from mcore_patches.cpu import launch
from tests import releases
from tests.launching import run

CASES = "tests.cpu.shim_cases"

MLA = "megatron.core.transformer.multi_latent_attention"
VARIANTS = "megatron.core.transformer.experimental_attention_variant"


def expected_rebindings(version):
    names = {
        *(f"torch.cuda.{name}" for name in ("current_device", "get_rng_state", "set_rng_state", "manual_seed")),
        *(f"torch.cuda.{name}" for name in ("synchronize", "current_stream", "stream")),
        *("torch.cuda.random.get_rng_state", "torch.cuda.random.set_rng_state"),
        *("torch.cuda.nvtx.range_push", "torch.cuda.nvtx.range_pop"),
        "torch.autograd._engine_run_backward",
        "torch._dynamo.eval_frame._stance",
        "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    }
    return names | expected_stand_ins(version)


def expected_stand_ins(version):
    names = {f"{MLA}.TELinear", f"{VARIANTS}.dsa.hadamard_transform"}
    if version == "0.16.1":
        names.add(f"{MLA}.HAVE_TE")
    else:
        names.add(f"{VARIANTS}.absorbed_mla.TELinear")
    if not releases.at_least(version, "0.19.0"):
        names.add(f"{VARIANTS}.dsa.rotate_activation")
    return names


@pytest.mark.parametrize("version", releases.RELEASES)
def test_life_cycle(version):
    (cases,) = run(f"{CASES}:life_cycle", release=version)
    assert cases["megatron imported"] is False
    assert {f"{owner}.{name}" for owner, name, _ in cases["rebindings"]} == expected_rebindings(version)
    assert all(len(reason) > 20 for *_, reason in cases["rebindings"])
    assert cases["rebound"] == []
    assert set(cases["devices"].values()) == {"cpu"}
    assert cases["restored"] == []
    assert cases["alias restored"] is True
    assert cases["left before import"] == []
    assert cases["modes"] == 0
    assert cases["off"] == (False, ())
    assert set(cases["changed after import"]) == expected_rebindings(version)
    assert cases["left after import"] == []
    assert set(cases["stand-ins"]) == expected_stand_ins(version)
    assert cases["left by stand-ins"] == []


def test_behaviour():
    (cases,) = launch.run(f"{CASES}:behaviour")
    assert "hide them with CUDA_VISIBLE_DEVICES='', or pass allow_cuda=True" in cases["cuda"]
    assert cases["off after cuda"] is False
    assert cases["off twice"] == "the CPU shim is off: enable() it first"
    assert cases["on twice"].startswith("the CPU shim is on already")
    assert cases["on after nesting"] is True
    assert "a TorchFunctionMode entered after it is still active" in cases["later mode"]
    assert "rebound by other code since" in cases["foreign"]
    assert "torch.cuda.synchronize" in cases["foreign"]
    assert cases["on after foreign"] is True
    assert cases["off after an exception"] is False
    assert cases["backward"] == cases["grad"] == [2.0, 2.0, 2.0]
    assert cases["modes in backward"] == 1
    assert cases["devices in backward"] == ["cpu", "cpu"]
    assert cases["fused"] == cases["fused after it"] == [3.0, 3.0, 3.0]
    assert (cases["compiled in the shim"], cases["compiled after it"]) == (0, 1)
