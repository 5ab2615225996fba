from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import py_compile
import sys
import types
import zipfile
from pathlib import Path

import pytest

from mcore_patches.overlay.locate import Located, locate


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Writes files under a fresh folder of sys.path and leaves no trace of them in sys.modules or the finders."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path_hooks", list(sys.path_hooks))

    def write(**files: str) -> Path:
        for name, text in files.items():
            path = tmp_path / (name.replace("__", "/").replace("/init", "/__init__") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        return tmp_path

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]
    for entry in [entry for entry in sys.path_importer_cache if entry.startswith(str(tmp_path))]:
        del sys.path_importer_cache[entry]


EXPLODES = "raise RuntimeError('was executed')"


def test_found_without_executing_parents(tree):
    root = tree(outer__init=EXPLODES, outer__inner__init=EXPLODES, outer__inner__leaf=EXPLODES)
    leaf = root / "outer/inner/leaf.py"
    assert locate("outer.inner.leaf") == Located("outer.inner.leaf", str(leaf), False, "", "found")
    assert locate("outer.inner") == Located("outer.inner", str(root / "outer/inner/__init__.py"), True, "", "found")
    assert not [name for name in sys.modules if name.startswith("outer")]


def test_namespace_packages_nested_in_a_package(tree):
    root = tree(outer__init=EXPLODES, outer__plain__deeper__leaf=EXPLODES)
    assert locate("outer.plain.deeper.leaf").file == str(root / "outer/plain/deeper/leaf.py")
    plain = locate("outer.plain.deeper")
    assert (plain.found, plain.file, plain.is_package) == (True, None, True)
    assert "namespace package" in plain.reason
    assert str(root / "outer/plain/deeper") in plain.reason
    with pytest.raises(KeyError):  # why PathFinder itself is not asked
        importlib.machinery.PathFinder.find_spec("outer.plain", [str(root / "outer")])


def test_namespace_portions_on_several_path_entries(tree, tmp_path, monkeypatch):
    tree(shared__first=EXPLODES)
    second = tmp_path / "elsewhere"
    (second / "shared").mkdir(parents=True)
    (second / "shared/second.py").write_text(EXPLODES)
    monkeypatch.syspath_prepend(str(second))
    assert locate("shared.first").file == str(tmp_path / "shared/first.py")
    assert locate("shared.second").file == str(second / "shared/second.py")


def test_absent_root():
    answer = locate("no_such_root.core.utils")
    assert (answer.kind, answer.found, answer.file, answer.is_package) == ("root-absent", False, None, False)
    assert answer.reason == "no top-level package no_such_root on sys.path"


def test_absent_submodule_names_the_level_and_the_folder(tree):
    root = tree(outer__init=EXPLODES, outer__plain__leaf=EXPLODES)
    answer = locate("outer.plain.missing.leaf")
    assert (answer.kind, answer.file) == ("submodule-absent", None)
    assert answer.reason == f"no module outer.plain.missing below outer.plain ({root / 'outer/plain'})"


def test_parent_that_is_no_package(tree):
    root = tree(outer__init=EXPLODES, outer__leaf=EXPLODES)
    answer = locate("outer.leaf.below")
    assert answer.kind == "submodule-absent"
    assert (
        answer.reason == f"no module outer.leaf.below: outer.leaf is a module, not a package ({root / 'outer/leaf.py'})"
    )


def test_imported_parent_that_is_no_package(tree):
    tree(single="")
    importlib.import_module("single")
    assert locate("single.below").kind == "submodule-absent"


def test_imported_modules_are_believed(tree):
    root = tree(outer__init="", outer__leaf="")
    leaf = importlib.import_module("outer.leaf")
    moved = root / "moved.py"
    moved.write_text("")
    leaf.__file__ = str(moved)
    assert locate("outer.leaf").file == str(moved)


def test_path_of_an_imported_parent_is_followed(tree):
    root = tree(outer__init="", redirected__leaf=EXPLODES)
    importlib.import_module("outer").__path__ = [str(root / "redirected")]
    assert locate("outer.leaf").file == str(root / "redirected/leaf.py")


@pytest.mark.parametrize("root", ["outer", "nowhere"])
def test_a_stub_below_parents_that_are_not_imported(tree, monkeypatch, root):
    tree(outer__init=EXPLODES)
    name = f"{root}.made_up"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    answer = locate(name)
    assert (answer.found, answer.file, answer.is_package) == (True, None, False)
    assert answer.reason == f"{name} has no file: it was put into sys.modules without a file"


def test_an_attribute_that_shadows_a_submodule(tree):
    root = tree(outer__init="from outer.ops import ops", outer__ops="def ops(): pass", outer__other="")
    package = importlib.import_module("outer")
    assert not isinstance(package.ops, types.ModuleType)
    assert locate("outer.ops").file == str(root / "outer/ops.py")


def test_a_lazy_package_stays_unloaded(tree):
    root = tree(lazy__init=EXPLODES, lazy__leaf=EXPLODES)
    spec = importlib.util.find_spec("lazy")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["lazy"] = module
    spec.loader.exec_module(module)
    assert locate("lazy.leaf").file == str(root / "lazy/leaf.py")
    assert locate("lazy").file == str(root / "lazy/__init__.py")
    with pytest.raises(RuntimeError, match="was executed"):
        module.anything  # noqa: B018


def test_a_module_getattr_is_not_called(tree):
    root = tree(outer__init="def __getattr__(name): raise RuntimeError(name)", outer__leaf=EXPLODES)
    importlib.import_module("outer")
    assert locate("outer.leaf").file == str(root / "outer/leaf.py")


@pytest.mark.parametrize(("blocked", "kind"), [("outer", "root-absent"), ("outer.leaf", "submodule-absent")])
def test_a_blocked_import(tree, monkeypatch, blocked, kind):
    tree(outer__init=EXPLODES, outer__leaf=EXPLODES)
    monkeypatch.setitem(sys.modules, blocked, None)
    answer = locate("outer.leaf")
    assert answer.kind == kind
    assert answer.reason == f"the import of {blocked} is blocked: sys.modules[{blocked!r}] is None"


def test_a_path_that_cannot_be_read(tree, monkeypatch):
    tree()

    class Path:
        def __iter__(self):
            raise KeyError("parent")

    package = types.ModuleType("outer")
    package.__path__ = Path()
    monkeypatch.setitem(sys.modules, "outer", package)
    assert (
        locate("outer.leaf").reason == "the __path__ of the imported package outer cannot be read: KeyError('parent')"
    )


class MappingFinder:
    """An editable install's finder: one package name mapped to a folder anywhere."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.name:
            return importlib.util.spec_from_file_location(
                fullname, self.folder / "__init__.py", submodule_search_locations=[str(self.folder)]
            )
        return None


def test_an_editable_install_with_a_mapping_finder(tree):
    root = tree(source__package__init=EXPLODES, source__package__space__leaf=EXPLODES)
    sys.meta_path.append(MappingFinder("editable", root / "source/package"))
    assert locate("editable").file == str(root / "source/package/__init__.py")
    assert locate("editable.space.leaf").file == str(root / "source/package/space/leaf.py")


def test_an_editable_namespace_behind_a_path_hook(tree, monkeypatch):
    root = tree(source__core__init=EXPLODES, source__core__leaf=EXPLODES)
    placeholder = "__editable__.example-1.0.finder.__path_hook__"

    class Namespace:
        @classmethod
        def find_spec(cls, fullname, target=None):
            if fullname != "editable_space":
                return None
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [str(root / "source"), placeholder]
            return spec

    def hook(entry):
        if entry != placeholder:
            raise ImportError
        return Namespace

    sys.path_hooks.append(hook)
    monkeypatch.setattr(sys, "path", [*sys.path, placeholder])
    monkeypatch.setattr(sys, "path_importer_cache", dict(sys.path_importer_cache))
    assert locate("editable_space.core.leaf").file == str(root / "source/core/leaf.py")
    assert locate("editable_space.missing").kind == "submodule-absent"


def test_a_finder_that_gives_an_origin_without_saying_that_it_is_a_file(tree):
    root = tree(elsewhere=EXPLODES)

    class Finder:
        def find_spec(self, fullname, path=None, target=None):
            if fullname not in ("at_file", "at_nothing"):
                return None
            origin = str(root / "elsewhere.py") if fullname == "at_file" else "a database"
            return importlib.machinery.ModuleSpec(fullname, None, origin=origin)

    sys.meta_path.append(Finder())
    assert locate("at_file").file == str(root / "elsewhere.py")
    assert locate("at_nothing").reason == "at_nothing has no file: its origin is 'a database'"


class Raising:
    def find_spec(self, fullname, path=None, target=None):
        raise OSError("stale handle")


def test_a_raising_finder_is_passed_over(tree):
    root = tree(outer__init=EXPLODES, outer__leaf=EXPLODES)
    sys.meta_path.insert(0, Raising())
    answer = locate("outer.leaf")
    assert (answer.file, answer.reason) == (str(root / "outer/leaf.py"), "")


def test_a_raising_finder_is_named_where_nothing_is_found(tree):
    tree(outer__init=EXPLODES)
    sys.meta_path.insert(0, Raising())
    reason = locate("outer.leaf").reason
    assert reason.startswith("no module outer.leaf below outer (")
    assert reason.endswith(f"; finder {__name__}.Raising raised OSError('stale handle')")


def test_a_finder_that_hands_namespaces_to_pathfinder(tree):
    root = tree(outer__init=EXPLODES, outer__plain__leaf=EXPLODES)

    class Delegating:
        def find_spec(self, fullname, path=None, target=None):
            return importlib.machinery.PathFinder.find_spec(fullname, path)

    sys.meta_path.insert(0, Delegating())
    assert locate("outer.plain.leaf").file == str(root / "outer/plain/leaf.py")


def test_a_raising_path_hook(tree, monkeypatch, tmp_path):
    root = tree(outer__init=EXPLODES)

    def hook(entry):
        if entry == "broken-entry":
            raise RuntimeError("bad hook")
        raise ImportError

    sys.path_hooks.insert(0, hook)
    monkeypatch.setattr(sys, "path", ["broken-entry", 7, *sys.path])
    assert locate("outer").file == str(root / "outer/__init__.py")
    reason = locate("outer_missing").reason
    assert reason.endswith("on sys.path; looking in 'broken-entry' raised RuntimeError('bad hook')")


@pytest.mark.parametrize("home", ["wrapt.importer", "vendored.copies.wrapt.importer", "ddtrace.internal.module"])
def test_watchers_of_imports_are_not_asked(tree, home):
    root = tree(outer__init="", outer__leaf=EXPLODES)

    class Base:
        busy = False

        def find_spec(self, fullname, path=None, target=None):
            if self.busy:
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(fullname)  # imports the parents
            finally:
                self.busy = False

    class Watcher(Base):
        pass

    sys.meta_path.insert(0, Watcher())
    Base.__module__ = home
    assert locate("outer.leaf").file == str(root / "outer/leaf.py")
    assert "outer" not in sys.modules
    Base.__module__ = __name__
    locate("outer.leaf")
    assert "outer" in sys.modules  # the danger is real


def test_wrapt_hooks_are_not_triggered(fresh_python, tmp_path):
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer/__init__.py").write_text("")
    (tmp_path / "outer/leaf.py").write_text("")
    code = """
import json, sys, wrapt
from mcore_patches.overlay.locate import locate
fired = []
wrapt.register_post_import_hook(fired.append, "outer")
wrapt.register_post_import_hook(fired.append, "outer.leaf")
file = locate("outer.leaf").file
early = [name for name in sys.modules if name.startswith("outer")]
before = len(fired)
import outer.leaf
print(json.dumps([file, early, before, len(fired), locate("outer.leaf").file]))
"""
    leaf = str(tmp_path / "outer/leaf.py")
    assert fresh_python(code, path=[tmp_path]) == [leaf, [], 0, 2, leaf]


def test_a_module_in_a_zip_archive(tree, tmp_path, monkeypatch):
    tree()
    archive = tmp_path / "bundle.zip"
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr("zipped/__init__.py", EXPLODES)
        bundle.writestr("zipped/leaf.py", EXPLODES)
    monkeypatch.syspath_prepend(str(archive))
    assert locate("zipped.leaf").file == f"{archive}/zipped/leaf.py"


def test_a_module_without_source(tree):
    root = tree(outer__init=EXPLODES, outer__leaf=EXPLODES)
    py_compile.compile(str(root / "outer/leaf.py"), cfile=str(root / "outer/leaf.pyc"))
    (root / "outer/leaf.py").unlink()
    importlib.invalidate_caches()
    assert locate("outer.leaf").file == str(root / "outer/leaf.pyc")


def test_built_in_modules_have_no_file():
    answer = locate("sys")
    assert (answer.found, answer.file, answer.reason) == (True, None, "sys has no file: its origin is 'built-in'")


def test_the_working_folder_as_path_entry(tree, monkeypatch, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    tree(work__here=EXPLODES)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert locate("here").file == str(folder / "here.py")
    assert "" not in sys.path_importer_cache


@pytest.mark.parametrize("name", ["", ".relative", "a..b", "a.", "a-b", "a b", None, 3])
def test_names_that_nothing_could_import(name):
    with pytest.raises(ValueError, match="allowed is an absolute dotted name"):
        locate(name)


def test_agrees_with_the_import_system_on_the_standard_library():
    names = ["json", "json.decoder", "email.mime.text", "xml.etree.ElementTree", "concurrent.futures.thread", "zipfile"]
    for name in names:
        spec = importlib.util.find_spec(name)
        assert locate(name).file == spec.origin
        assert locate(name).is_package == (spec.submodule_search_locations is not None)


@pytest.mark.parametrize("release", ["0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2"])
def test_every_module_of_a_release(fresh_python, releases, release):
    """Each module of the wheel is found at its file, and looking for a thousand of them imports none."""
    code = """
import json, sys
from pathlib import Path
from mcore_patches.overlay.locate import locate
root = Path(sys.stdin.read())
wrong, count = [], 0
for file in sorted(root.glob("megatron/core/**/*.py")):
    parts = file.relative_to(root).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    if all(map(str.isidentifier, parts)):
        count += 1
        if locate(".".join(parts)).file != str(file):
            wrong.append(str(file))
ops = "megatron.core.transformer.experimental_attention_variant.ops.tilelang_dsa"
early = [name for name in sys.modules if name.split(".")[0] in ("megatron", "torch")]
print(json.dumps({"wrong": wrong, "count": count, "tilelang": locate(ops).kind, "early": early}))
"""
    root = releases / release
    seen = fresh_python(code, path=[root], text=str(root))
    assert seen.pop("count") > 250
    expected = "found" if release >= "0.19" else "submodule-absent"
    assert seen == {"wrong": [], "tilelang": expected, "early": []}


def test_importing_it_imports_little(fresh_python):
    modules = fresh_python("import json, sys, mcore_patches.overlay.locate; print(json.dumps(list(sys.modules)))")
    assert "mcore_patches.overlay.locate" in modules
    assert {"torch", "megatron", "packaging", "wrapt", "importlib.metadata"}.isdisjoint(modules)
