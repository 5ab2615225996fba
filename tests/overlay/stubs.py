"""A stub megatron-core written to a folder, and patches for it.

tree = Tree(tmp_path).write("megatron.core.ops", "def f(x):\n    return x\n").use()
engine = engine_for(patch("times_ten", tree, "megatron.core.ops:f", times(10)))
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_patches.overlay.engine import Engine
from mcore_patches.overlay.fingerprint import combined_texts
from mcore_patches.overlay.patch import Below, ConfigField, FieldsTarget, ModuleTarget, Patch, Target, Verdict, covers
from mcore_patches.overlay.registry import Entry, Registry
from mcore_patches.overlay.versions import Releases

OPS = "megatron.core.ops"
OPS_TEXT = '''\
def f(x):
    """Upstream's."""
    return x + 1


def g(x):
    return f(x)
'''


class Tree:
    """A folder with megatron/core/package_info.py; megatron itself is a namespace package, as upstream's."""

    def __init__(self, root: Path, version: str = "0.19.2", suffix: str = "", local: str = "") -> None:
        self.root = root
        major, minor, patch = version.split(".")
        self.write("megatron.core.__init__", "")
        self.write(
            "megatron.core.package_info",
            f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = {suffix!r}\n"
            "VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n"
            "__shortversion__ = '.'.join(map(str, VERSION[:3]))\n"
            f"__version__ = '.'.join(map(str, VERSION[:3])) + ''.join(VERSION[3:]) + {local!r}\n",
        )

    def write(self, module: str, text: str) -> Tree:
        path = self.path(module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return self

    def path(self, module: str) -> Path:
        return self.root.joinpath(*module.split(".")).with_suffix(".py")

    def text(self, module: str) -> str:
        return self.path(module).read_text()

    def imported(self, module: str) -> ModuleType:
        """Import a module of the tree. An AssertionError says what was imported if that is of another megatron."""
        found = importlib.import_module(module)
        assert found.__file__ == str(self.path(module)), (
            f"{module} was imported from {found.__file__}, not from {self.path(module)}, which "
            f"{'is there' if self.path(module).is_file() else 'is gone'}; "
            f"megatron.core is {sys.modules['megatron.core'].__file__}, sys.path is {sys.path}"
        )
        return found

    def use(self) -> Tree:
        sys.path.insert(0, str(self.root))
        importlib.invalidate_caches()
        return self


def ops_tree(root: Path, text: str = OPS_TEXT, **version: str) -> Tree:
    return Tree(root, **version).write(OPS, text).use()


def times(factor: int) -> Callable[[Below], Callable[[int], int]]:
    """build() of a layer that multiplies what is below by `factor`."""

    def build(below: Below) -> Callable[[int], int]:
        call, counters = below.call, below.counters

        def replacement(x):
            counters.hit("fused")
            return factor * call(x)

        return replacement

    return build


def target(
    tree: Tree | None,
    name: str = f"{OPS}:f",
    build: Callable[[Below], Callable[..., Any]] | None = None,
    *,
    known: Verdict | None = "needs",
    **options: Any,
) -> Target:
    """A target whose text, as it stands in the tree now, is known as `known`; unknown for None. Default: times ten."""
    module, _, qualname = name.partition(":")
    made = Target(modules=(module,), qualname=qualname, build=build or times(10), **options)
    if known is None:
        return made
    assert tree is not None
    fingerprint = combined_texts([(tree.text(m), q) for m, q in covers(made, module)])
    assert fingerprint is not None
    return replace(made, known={fingerprint: known})


def fields_target(*fields: ConfigField, module: str = "megatron.core.config", qualname: str = "Config") -> FieldsTarget:
    return FieldsTarget(modules=(module,), qualname=qualname, fields=fields)


def provided_target(module: str = "megatron.core.extra", *names: str, tree: Tree | None = None) -> ModuleTarget:
    """A target for which `acme_extra` provides `names`; the text in the tree, if there is one, needs it."""
    made = ModuleTarget(modules=(module,), provider="acme_extra", names=names or ("Thing", "limit"))
    if tree is None:
        return made
    fingerprint = combined_texts([(tree.text(m), q) for m, q in covers(made, module)])
    assert fingerprint is not None
    return replace(made, known={fingerprint: "needs"})


def patch(id: str, *targets: Any, **options: Any) -> Patch:
    settings: dict[str, Any] = {"late_safe": True, "releases": Releases((0, 19, 0), (0, 20, 0))} | options
    return Patch(
        id=id,
        summary=f"test patch {id}",
        upstream=f"NVIDIA/Megatron-LM#{len(id)}",
        delete_when="never",
        targets=targets,
        **settings,
    )


def entry(p: Patch, *, builtin: bool = True) -> Entry:
    return Entry(p.id, p, "tests" if builtin else "somebody 1.0", builtin)


def engine_for(*patches: Patch, third_party: tuple[Patch, ...] = ()) -> Engine:
    entries = [*(entry(p) for p in patches), *(entry(p, builtin=False) for p in third_party)]
    return Engine(lambda: Registry(entries), "0.0.test")


def module(name: str = OPS) -> Any:
    return importlib.import_module(name)


class Records(logging.Handler):
    """Collects what the overlay logs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []
        logger = logging.getLogger("mcore_patches")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def lines(self) -> list[tuple[str, str]]:
        return [(r.levelname, r.getMessage()) for r in self.records]
