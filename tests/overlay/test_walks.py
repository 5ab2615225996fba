"""Random walks through all that can happen to a target; the live objects must be right after every step."""

from __future__ import annotations

import importlib
import random
import sys

import pytest

from mcore_patches.overlay.patch import State
from mcore_patches.overlay.rebind import MADE_BY
from tests.leaks import patches_in_place
from tests.overlay.isolation import isolated
from tests.overlay.stubs import OPS, engine_for, module, ops_tree, patch, target, times

FACTORS = {"two": 2, "three": 3, "five": 5}
STEPS = 120


class World:
    """The process as it should be: which layers lie on the live target, and which names were taken when."""

    def __init__(self, tree, rng):
        self.tree, self.rng = tree, rng
        self.engine = engine_for(
            *(patch(i, target(tree, build=times(n), level=rng.randrange(3))) for i, n in FACTORS.items())
        )
        self.wanted: set[str] = set()
        self.upstream = None
        self.users = 0

    def apply(self):
        patch_id = self.rng.choice(list(FACTORS))
        self.engine.apply(patch_id, strict=True)
        self.wanted.add(patch_id)

    def revert(self):
        patch_id = self.rng.choice(list(FACTORS))
        self.engine.revert(patch_id)
        self.wanted.discard(patch_id)

    def import_(self):
        module()
        self.upstream = self.upstream or self.engine_original()

    def engine_original(self):
        live = module().f
        stack = vars(live).get("__mcore_patches__")
        return stack.original if stack else live

    def reload(self):
        if OPS in sys.modules:
            importlib.reload(sys.modules[OPS])
            self.wanted.clear()
            self.upstream = sys.modules[OPS].f

    def delete(self):
        if sys.modules.pop(OPS, None) is not None:
            self.wanted.clear()
            self.upstream = None

    def take_a_name(self):
        """Some module, of megatron's or not, imports the function by name."""
        self.users += 1
        name = f"{self.rng.choice(['megatron.core', 'elsewhere'])}_user{self.users}".replace("core_", "core.")
        self.tree.write(name, f"from {OPS} import f as renamed\n")
        importlib.invalidate_caches()
        module(name)
        self.upstream = self.upstream or self.engine_original()

    def look(self):
        self.engine.status()
        self.engine.apply(dry_run=True)

    def check(self):
        report = self.engine.status()
        if OPS not in sys.modules:
            waiting = {row.id for row in report if row.state is State.PENDING}
            assert waiting == self.wanted
            return
        expected = 2
        for i in self.wanted:
            expected *= FACTORS[i]
        live = sys.modules[OPS]
        assert (live.f(1), live.g(1)) == (expected, expected)
        assert {row.id for row in report if row.state is State.APPLIED} == self.wanted
        assert self.wanted or live.f is self.upstream


@pytest.mark.parametrize("seed", range(6))
@isolated()
def test_a_random_walk(tmp_path, seed):
    rng = random.Random(seed)
    world = World(ops_tree(tmp_path), rng)
    steps = [world.apply] * 4 + [world.revert] * 3 + [world.import_, world.reload, world.delete, world.look]
    steps += [world.take_a_name] * 2
    taken = []
    for _ in range(STEPS):
        step = rng.choice(steps)
        taken.append(step.__name__)
        try:
            step()
            world.check()
        except Exception as error:
            raise AssertionError(f"after {' '.join(taken)}") from error
    world.engine.revert()
    assert patches_in_place() == []
    for name, user in list(sys.modules.items()):
        if "_user" in name or ".user" in name:
            assert not hasattr(user.renamed, MADE_BY), f"{name} after {' '.join(taken)}"
            assert user.renamed(1) == 2
