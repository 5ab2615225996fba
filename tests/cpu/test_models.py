"""Real megatron models on a CPU, on every release: training, and every parallel layout against one process."""

import math
from itertools import pairwise

import pytest

from tests import releases
from tests.launching import run

CASES = "tests.cpu.cases"
KINDS = ("gqa", "gqa-normed", "mla", "mla-normed", "dsa", "dsa-normed")
NEW = [version for version in releases.RELEASES if releases.at_least(version, "0.19.0")]
PARAMETERS = {"gqa": 15, "gqa-normed": 19, "mla": 21, "mla-normed": 25, "dsa": 31, "dsa-normed": 35}
TOLERANCE = 1e-5  # relative; fp32, measured up to 1.2e-6


def assert_same(name, difference, *, indexer=1.0, parameters=None):
    """Equal loss and gradients, those of the indexer times a factor."""
    assert difference["same names"], name
    assert difference["count"] == (parameters or PARAMETERS[name.split()[0]]), name
    assert difference["loss"] < TOLERANCE, name
    assert difference["gradients"][1] < TOLERANCE, (name, difference["gradients"])
    assert difference["indexer residual"] < TOLERANCE, name
    expected = [indexer] if "dsa" in name else []
    assert difference["indexer factors"] == pytest.approx(expected, abs=1e-4), name


@pytest.mark.parametrize("version", releases.RELEASES)
def test_one_process(version, subtests):
    """Plain steps train; the schedule over two microbatches, with and without recomputation, equals their mean."""
    (cases,) = run(f"{CASES}:one_process", release=version)
    # Before 0.19 the schedules do not scale the indexer's loss by the number of microbatches.
    indexer = 1.0 if version in NEW else 2.0
    for kind in ("gqa", "mla", "dsa"):
        for dtype in ("fp32", "bf16"):
            with subtests.test(f"{kind}-{dtype} trains"):
                losses = cases[f"{kind}-{dtype} losses"]
                assert losses[0] == pytest.approx(math.log(128), abs=1)  # random weights: a uniform guess, roughly
                assert all(later < earlier - 0.1 for earlier, later in pairwise(losses))
    for kind in KINDS:
        for what in ("schedule", "recompute"):
            with subtests.test(f"{kind} {what}"):
                assert_same(f"{kind} {what}", cases[f"{kind} {what}"], indexer=indexer)
        with subtests.test(f"{kind} optimizer"):
            before, after = cases[f"{kind} optimizer"]
            assert after < before - 0.1


@pytest.mark.parametrize("version", releases.RELEASES)
def test_two_ranks(version, tmp_path, subtests):
    """DP2, TP2 with sequence parallelism and PP2 equal one process; checkpoints move between layouts."""
    first, second = run(f"{CASES}:two_ranks", nprocs=2, release=version, args=(str(tmp_path),))
    for rank, cases in enumerate((first, second)):
        assert cases["dp"] == 2
        assert cases["pp2 schedule"] == "forward_backward_pipelining_without_interleaving"
        assert cases["interleaved schedule"] == "forward_backward_pipelining_with_interleaving"
        with subtests.test(f"rank {rank} gqa"):
            assert_same("gqa dp2", cases["gqa dp2"])
            assert_same("gqa tp2 without sp", cases["gqa tp2 without sp"])
            # Megatron's: neither the shared rotary key's gradient nor the q norm's is reduced as it should be.
            assert cases["mla-normed tp2 without sp"] == [
                "input_layernorm.weight",
                "self_attention.linear_kv_down_proj.weight",
                "self_attention.q_layernorm.weight",
            ]
            assert_same("gqa pp2 interleaved", cases["gqa pp2 interleaved"], parameters=27)
        for kind in KINDS:
            with subtests.test(f"rank {rank} {kind}"):
                # Before 0.19: times the microbatches, and summed over tensor-parallel ranks instead of averaged.
                assert_same(f"{kind} tp2", cases[f"{kind} tp2"], indexer=1.0 if version in NEW else 4.0)
                assert_same(f"{kind} pp2", cases[f"{kind} pp2"], indexer=1.0 if version in NEW else 2.0)
                assert cases[f"{kind} tp2 weights"]
                assert cases[f"{kind} loaded from tp2"]


def test_context_parallel(subtests):
    """CP2 and TP2 x CP2, batched and packed, equal one process on 0.19.2, but for the indexer's scale."""
    for rank, cases in enumerate(run(f"{CASES}:context_parallel", nprocs=4, release="0.19.2")):
        for layout in ("cp2", "tp2 cp2", "tp2 cp2 recompute"):
            for form in ("bshd", "thd"):
                with subtests.test(f"rank {rank} {layout} {form}"):
                    # The schedule multiplies the indexer's loss by the context-parallel size; unless it is per token.
                    assert_same(f"dsa {layout}", cases[f"{layout} {form}"], indexer=2.0)
        with subtests.test(f"rank {rank} per token"):
            assert_same("dsa per token", cases["tp2 cp2 per token"])


def assert_packed_documents_are_apart(cases):
    packed, padded, alone = cases["packed"]
    assert packed == pytest.approx(alone, rel=TOLERANCE)
    assert padded == pytest.approx(alone, rel=TOLERANCE)
    assert_same("dsa selective", cases["selective"])


def assert_fused_kernel_is_asked(cases):
    """NoPE (512 wide) and 15 tokens a query (no multiple of 64): it is called in every layer, and declines."""
    for name, width, tokens in (("nope", 512, 8), ("unaligned", 576, 15)):
        assert cases[f"{name} none calls"] == []
        call = ((32, 2, 4, width), (32, 2, 1, width), (2, 32, tokens), "torch.bfloat16", 512, None)
        assert cases[f"{name} tilelang calls"] == [call, call]
        assert_same(f"dsa {name}", cases[f"{name} step"])
        assert cases[f"{name} indexers"]["hidden"]
        assert cases[f"{name} indexers"]["restored"]


def assert_hybrid_equals_gpt(cases):
    assert_same("gqa", cases["gqa"])
    assert_same("dsa", cases["dsa"])


@pytest.mark.parametrize("version", releases.RELEASES[2:])
def test_what_newer_releases_have(version, subtests):
    """Hybrid models from 0.18; packed documents, selective recomputation and absorbed attention from 0.19."""
    checks = {"hybrid_models": assert_hybrid_equals_gpt}
    if version in NEW:
        checks |= {"packed_and_selective": assert_packed_documents_are_apart, "absorbed": assert_fused_kernel_is_asked}
    (cases,) = run(f"{CASES}:several", release=version, args=tuple(checks))
    for name, check in checks.items():
        with subtests.test(name):
            check(cases[name])


def test_what_older_releases_lack():
    (cases,) = run(f"{CASES}:release_refusals", release="0.17.1")
    assert cases["kernel backend"] == (
        "ValueError: kernel_backend='tilelang': this megatron-core release has no dsa_kernel_backend"
    )
    assert cases["fused indexer"].startswith("ValueError: this megatron-core release has no fused DSA kernels")
    assert cases["hybrid"].startswith("ValueError: this megatron-core release has no megatron.core.models.hybrid")


REFUSALS = {
    "without shim": "RuntimeError: init_model_parallel needs the CPU shim: "
    "call it inside cpu_megatron() or after enable()",
    "does not divide": "ValueError: tp=2 x cp=1 x pp=1 does not divide the world of 1 process(es)",
    "size": "ValueError: pp=0: a parallel size is at least 1",
    "not initialised": "RuntimeError: model parallelism is not initialised: call init_model_parallel() first",
    "dtype": "ValueError: dtype='fp16': expected one of ['bf16', 'fp32']",
    "field": "ValueError: no_such_field: no such field of MLATransformerConfig in this megatron-core release",
    "no documents": "ValueError: lengths=[]: expected at least one document, each of at least one token",
    "empty document": "ValueError: lengths=[3, 0]: expected at least one document, each of at least one token",
    "odd shard": "ValueError: a length of 6 tokens does not divide by 2 x 2 context-parallel ranks",
    "twice": "RuntimeError: torch.distributed is initialised already: call destroy() first",
    "sizes": "ValueError: config.tensor_model_parallel_size=2, but model parallelism has 1",
    "layers": "ValueError: 3 layer specs for num_layers=2",
    "microbatches": "ValueError: microbatches of sizes [(2, 8), (2, 16)]: expected at least one, all of one size",
    "no microbatches": "ValueError: microbatches of sizes []: expected at least one, all of one size",
    "bf16 optimizer": "ValueError: bf16 model: megatron's mixed-precision optimizer runs on CUDA only, "
    "use an fp32 model",
    "plain step": "ValueError: tensor_model_parallel_size=2: train_step is for one process, use schedule_step",
}


def test_bad_input_and_shards(subtests):
    (cases,) = run(f"{CASES}:several", release="0.19.2", args=("refusals", "shards"))
    with subtests.test("bad input"):
        assert cases["refusals"] == REFUSALS
    with subtests.test("shards"):
        assert_zigzag(cases["shards"])


def assert_zigzag(cases):
    """Rank r of n takes chunks r and 2n-1-r of each document."""
    assert cases["bshd"] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert cases["thd"] == [[[0, 3, 0, 1, 6, 7]], [[1, 2, 2, 3, 4, 5]]]
    assert cases["loss mask"] == [[[1, 0, 1, 1, 1, 1]], [[1, 1, 1, 1, 1, 1]]]
    assert cases["real"] == [0, 3, 11]
    assert cases["padded"] == [0, 4, 12]
    assert cases["same content"]
