"""What importing the package costs and loads, measured in interpreters of their own."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import mcore_patches.overlay
import mcore_patches.patches
from mcore_patches.overlay.patch import FieldsTarget
from mcore_patches.overlay.registry import Registry
from tests import releases

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "megatron", "wrapt", "packaging", "importlib.metadata", "tilelang", "numpy", "inspect", "dataclasses")


def loaded_by(statement: str) -> set[str]:
    """Modules in sys.modules after the statement in a fresh interpreter, without those that it starts with."""
    code = (
        f"import sys; b = set(sys.modules); {statement}; import json; print(json.dumps(sorted(set(sys.modules) - b)))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MCORE_PATCHES"))}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_next_to_nothing():
    modules = loaded_by("import mcore_patches")
    assert "mcore_patches" in modules
    assert not modules & set(HEAVY)
    assert not [m for m in modules if m.startswith("mcore_patches.")]


@pytest.mark.parametrize("package", [mcore_patches.overlay, mcore_patches.patches])
def test_no_module_of_the_overlay_or_of_the_patches_imports_torch_or_megatron(package):
    names = [f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(package.__path__)]
    assert names
    modules = loaded_by(f"import {', '.join(names)}")
    assert set(names) <= modules
    assert not modules & {"torch", "megatron", "tilelang", "wrapt"}


def test_a_status_loads_neither_torch_nor_megatron():
    modules = loaded_by("import mcore_patches; mcore_patches.status(); mcore_patches.apply_patches(dry_run=True)")
    assert not [m for m in modules if m.partition(".")[0] in ("torch", "megatron", "tilelang")]


def test_the_public_names_are_there_and_documented():
    import mcore_patches

    for name in mcore_patches.__all__:
        assert hasattr(mcore_patches, name)
        assert name == "__version__" or getattr(mcore_patches, name).__doc__


# Who else holds a target ---------------------------------------------------------------------------------------------


def sources(release: str):
    """(module, text) of every module of the unpacked wheel."""
    root = releases.path(release)
    for path in sorted((root / "megatron").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path.read_text(encoding="utf-8")


def absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    base = module.split(".")
    base = base[: len(base) - node.level + (1 if is_package else 0)]
    return ".".join([*base, *([node.module] if node.module else [])])


def at_import_time(tree: ast.AST):
    """Nodes that run when the module is imported: not those inside functions, which look a name up at each call."""
    pending = list(ast.iter_child_nodes(tree))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def from_imports(release: str, wanted: set[tuple[str, str]]) -> set[str]:
    """ "module imports target" for each from-import of a wanted (module, name) that outlives the import statement."""
    found = set()
    names = {name for _, name in wanted} | {"import *"}
    for module, text in sources(release):
        if not any(name in text for name in names):
            continue
        is_package = (releases.path(release).joinpath(*module.split(".")) / "__init__.py").exists()
        for node in at_import_time(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                origin = absolute(module, is_package, node)
                for alias in node.names:
                    taken = {n for m, n in wanted if m == origin and alias.name in (n, "*")}
                    found |= {f"{module} imports {origin}.{name}" for name in taken}
    return found


# From-imports that were looked at, "module imports target"; apply_patches() rebinds such a name.
OPS = "megatron.core.transformer.experimental_attention_variant.ops"
OF_0_19 = {
    "megatron.core.models.gpt.experimental_attention_variant_module_specs imports "
    "megatron.core.transformer.experimental_attention_variant.absorbed_mla.AbsorbedMLASelfAttention",
    "megatron.core.models.hybrid.hybrid_layer_specs imports "
    "megatron.core.transformer.experimental_attention_variant.absorbed_mla.AbsorbedMLASelfAttention",
    "megatron.core.recompute imports megatron.core.extensions.transformer_engine.te_checkpoint",
    "megatron.core.tensor_parallel imports megatron.core.tensor_parallel.random.checkpoint",
    "megatron.core.transformer.moe.moe_layer imports megatron.core.extensions.transformer_engine.te_checkpoint",
    f"{OPS}.tilelang_dsa imports {OPS}.tilelang_indexer_loss.sparse_indexer_target_interface",
}
KNOWN_FROM_IMPORTS: dict[str, set[str]] = {"0.19.0": OF_0_19, "0.19.2": OF_0_19}


@pytest.mark.parametrize("release", releases.RELEASES)
def test_from_imports_of_targets_in_the_wheel_are_known(release):
    """A new one is a reference that a patch did not reckon with: is rebinding it enough? Then note it above."""
    wanted = set()
    numbers = tuple(map(int, release.split(".")))
    for entry in Registry.discover("mcore_patches.patches").entries.values():
        for target in entry.patch.targets if entry.patch else ():
            if target.releases is not None and numbers not in target.releases:
                continue
            if not isinstance(target, FieldsTarget) and "." not in target.qualname:
                wanted |= {(module, target.qualname) for module in target.modules}
    assert wanted
    assert from_imports(release, wanted) == KNOWN_FROM_IMPORTS.get(release, set())


@pytest.mark.parametrize("release", releases.RELEASES)
def test_the_scan_finds_from_imports(release):
    """One that every release has: transformer_block imports build_module from spec_utils."""
    wanted = {("megatron.core.transformer.spec_utils", "build_module")}
    found = from_imports(release, wanted)
    assert (
        "megatron.core.transformer.transformer_block imports megatron.core.transformer.spec_utils.build_module" in found
    )
