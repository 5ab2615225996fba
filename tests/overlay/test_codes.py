"""Code that another bugfix release of the same Python compiled: it runs alike, and is no other tool's doing.

Only one release is at hand, so its part is played by a text with the same tokens in other columns, and with `pass`
where the text itself has a remark: other positions, and a NOP more.
"""

from __future__ import annotations

import dis
import importlib.util
import marshal
import os
import py_compile
import struct
import subprocess
import sys
import types
from pathlib import Path

import pytest

from mcore_patches.overlay.codes import run_alike
from mcore_patches.overlay.patch import State
from tests.overlay.isolation import isolated
from tests.overlay.stubs import OPS, Tree, engine_for, module, patch, target

REMARK = "# a line of its own"

TEXT = f"""\
def f(x):
    y = x + 1
    {REMARK}
    return y


class Kernel:
    def forward(self, x):
        for i in range(x):
            if i == 7:
                x += 1
                {REMARK}
                continue
            try:
                with open(x) as a, open(a) as b:
                    x -= b
                    {REMARK}
            except ValueError as error:
                {REMARK}
                print(f"{{error}} of {{x!r:>3}}")
            finally:
                x = (lambda k, *, s=2.0: [k + j + s for j in (1, 2)])(x)
            {REMARK}
        return x

    @staticmethod
    def steps(n):
        while n:
            n -= 1
            {REMARK}
            yield n


def run(x):
    return Kernel().forward(x)


async def wait(x):
    async with x as y:
        {REMARK}
        async for z in y:
            await z
    match x:
        case (a, {{"k": b}}) if a > b:
            {REMARK}
            return a
        case _:
            {REMARK}
            return None
"""


def columns(text: str) -> str:
    return text.replace(" = ", "  =  ").replace("return ", "return   ")


def elsewhere(text: str) -> str:
    """What another release makes of the text is what this one makes of the result."""
    return columns(text).replace(REMARK, "pass")


def functions(text: str) -> dict[str, types.CodeType]:
    found: dict[str, types.CodeType] = {}
    pending = [compile(text, "text.py", "exec", dont_inherit=True)]
    while pending:
        for const in pending.pop().co_consts:
            if isinstance(const, types.CodeType):
                found[const.co_qualname] = const
                pending.append(const)
    return found


NAMES = ("f", "Kernel.forward", "Kernel.steps", "run", "wait", "Kernel")


@pytest.mark.parametrize("name", NAMES)
def test_another_release_s_code_runs_alike(name):
    here, there = functions(TEXT)[name], functions(elsewhere(TEXT))[name]
    assert here != there
    assert run_alike(here, there)
    assert run_alike(there, here)
    if name != "run":
        size = sum(len(code.co_code) for code in (here, *here.co_consts) if isinstance(code, types.CodeType))
        other = sum(len(code.co_code) for code in (there, *there.co_consts) if isinstance(code, types.CodeType))
        assert size < other, "the NOPs are there"


def long_loop(length: int, line: str = REMARK) -> types.CodeType:
    """A loop with a body of that many code units: statements of two, and one of three where the length is odd."""
    odd = length % 2
    body = "            n = n\n" * (length // 2 - odd) + "            n = -n\n" * odd
    return functions(f"def f(n):\n    while n:\n        {line}\n        if n:\n{body}    return n\n")["f"]


def test_a_nop_makes_a_jump_too_long_for_one_byte():
    def extended(code):
        return code.co_code[::2].count(dis.opmap["EXTENDED_ARG"])

    pairs = {n: (long_loop(n), long_loop(n, "pass")) for n in range(200, 300)}
    crossing = [n for n, (here, there) in pairs.items() if extended(here) < extended(there)]
    assert crossing
    for n in crossing:
        assert run_alike(*pairs[n])
        assert not run_alike(long_loop(n), long_loop(n + 2, "pass"))


def test_the_name_of_the_file_does_not_count():
    code = functions(TEXT)["Kernel.forward"]
    assert run_alike(code, code.replace(co_filename="/build/text.py"))


CHANGES = {
    "constant": ("x + 1\n", "x + 2\n", "f"),
    "type-of-constant": ("x + 1\n", "x + 1.0\n", "f"),
    "operation": ("x + 1\n", "x - 1\n", "f"),
    "name-of-argument": ("def f(x):\n    y = x", "def f(z):\n    y = z", "f"),
    "default-kept-apart": ("*, s=2.0", "s=2.0", "Kernel.forward"),
    "first-line": ("def f(x)", "\ndef f(x)", "f"),
    "operand": ("x += 1\n", "i += 1\n", "Kernel.forward"),
    "jump-elsewhere": ("continue", "break", "Kernel.forward"),
    "jump-otherwise": ("if i == 7", "if not i == 7", "Kernel.forward"),
    "compared-otherwise": ("if i == 7", "if i != 7", "Kernel.forward"),
    "handler": ("ValueError", "TypeError", "Kernel.forward"),
    "attribute": ("forward(x)", "backward(x)", "run"),
    "nested": ("k + j + s", "k + j - s", "Kernel.forward"),
    "constant-of-nested": ("(1, 2)", "(1, 2.0)", "Kernel.forward"),
    "yield": ("yield n", "yield", "Kernel.steps"),
    "await": ("await z", "z", "wait"),
    "pattern": ('"k": b', '"k2": b', "wait"),
    "guard": ("a > b", "a >= b", "wait"),
    "member": ("n -= 1", "n -= 2", "Kernel"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_runs_otherwise_is_not_alike(change):
    old, new, name = CHANGES[change]
    assert TEXT.count(old) == 1
    here = functions(TEXT)[name]
    for there in (TEXT.replace(old, new), elsewhere(TEXT.replace(old, new))):
        code = functions(there)[name]
        assert not run_alike(here, code)
        assert not run_alike(code, here)


INSIDE = "def f(x):\n    try:\n        g()\n        h()\n    except E:\n        pass\n"


def test_the_same_operations_under_fewer_handlers_are_not_alike():
    """The bytecode is one and the same; only the table of handlers tells."""
    code = functions(INSIDE)["f"]
    assert code.co_exceptiontable
    assert not run_alike(code, code.replace(co_exceptiontable=b""))
    assert run_alike(code, functions(INSIDE.replace("g()", "g( )"))["f"])


def test_the_same_operations_in_another_order_are_not_alike():
    here = functions("def f(a, b):\n    a.x = b\n    b.x = a\n")["f"]
    there = functions("def f(a, b):\n    b.x = a\n    a.x = b\n")["f"]
    assert not run_alike(here, there)
    here = functions("def f(a):\n    if a:\n        a = 1\n        a = 2\n    return a\n")["f"]
    there = functions("def f(a):\n    if a:\n        a = 1\n    a = 2\n    return a\n")["f"]
    assert not run_alike(here, there)


def test_bytecode_that_no_compiler_made_is_not_alike():
    code = functions("def f(n):\n    while n:\n        n -= 1\n")["f"]
    astray = bytearray(code.co_code)
    astray[2 * astray[::2].index(dis.opmap["POP_JUMP_IF_FALSE"]) + 1] = 200
    assert not run_alike(code.replace(co_code=bytes(astray)), code)


# Loaded in place of the text ------------------------------------------------------------------------------------------

CONSUMER = "megatron.core.consumer"
CONSUMER_TEXT = f"def g(x):\n    y = x + 1\n    {REMARK}\n    return y\n"


def compiled_tree(root: Path) -> Tree:
    """Two modules whose compiled files another release wrote, valid by time and size."""
    tree = Tree(root).write(OPS, TEXT).write(CONSUMER, CONSUMER_TEXT).use()
    for name in (OPS, CONSUMER):
        write_compiled(tree.path(name), elsewhere(tree.text(name)))
    return tree


def write_compiled(source: Path, text: str, kind: str = "time") -> Path:
    """The compiled file of `text`, as one that Python takes for that of `source`, whatever that has in it."""
    path = Path(importlib.util.cache_from_source(str(source)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compiled(source, text, kind))
    return path


def compiled(source: Path, text: str, kind: str = "time") -> bytes:
    code = marshal.dumps(compile(text, "/another/image/module.py", "exec", dont_inherit=True))
    if kind == "time":
        facts = source.stat()
        header = struct.pack("<III", 0, int(facts.st_mtime) & 0xFFFFFFFF, facts.st_size)
    else:
        checked = {"checked": 0b11, "unchecked": 0b01}[kind]
        header = struct.pack("<I", checked) + importlib.util.source_hash(source.read_bytes())
    return importlib.util.MAGIC_NUMBER + header + code


RELIED = ("Kernel", "run", f"{CONSUMER}:g")


def relying(tree: Tree):
    return engine_for(patch("tenfold", target(tree, relies_on=RELIED)))


def loaded(tree: Tree) -> tuple[types.ModuleType, types.ModuleType]:
    """The modules, after a check that they came from the compiled files and not from the text."""
    ops, consumer = module(), module(CONSUMER)
    for live, name in ((ops.f, OPS), (consumer.g, CONSUMER)):
        assert live.__code__.co_filename == str(tree.path(name))
        assert live.__code__ != functions(tree.text(name))[live.__name__]
        assert live.__code__ == functions(elsewhere(tree.text(name)))[live.__name__]
    return ops, consumer


@pytest.mark.parametrize("kind", ["time", "checked", "unchecked"])
@isolated()
def test_another_release_s_files_are_no_conflict(tmp_path, kind):
    tree = compiled_tree(tmp_path)
    for name in (OPS, CONSUMER):
        write_compiled(tree.path(name), elsewhere(tree.text(name)), kind)
    ops, _ = loaded(tree)
    engine = relying(tree)
    assert engine.apply(strict=True)["tenfold"].state is State.APPLIED
    assert ops.f(1) == 20
    assert engine.apply(strict=True)["tenfold"].state is State.ALREADY_APPLIED
    assert engine.revert()["tenfold"].state is State.NOT_APPLIED
    assert ops.f(1) == 2


@isolated()
def test_applied_when_such_a_file_is_imported_later(tmp_path):
    tree = compiled_tree(tmp_path)
    engine = relying(tree)
    assert engine.apply(strict=True)["tenfold"].state is State.PENDING
    assert module().f(1) == 20
    assert engine.status()["tenfold"].state is State.APPLIED


@isolated()
def test_such_files_below_another_prefix(tmp_path):
    sys.pycache_prefix = str(tmp_path / "prefix")
    tree = compiled_tree(tmp_path / "tree")
    ops, _ = loaded(tree)
    assert ops.__cached__.startswith(sys.pycache_prefix)
    assert relying(tree).apply(strict=True)["tenfold"].state is State.APPLIED


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_such_files_of_an_optimising_python(tmp_path, flag):
    """The file that this Python loads has its own name, and the comparison takes away what the flag takes away."""
    code = f"""
from pathlib import Path
from tests.overlay.test_codes import *
from mcore_patches.overlay.patch import State
from tests.overlay.stubs import *

tree = Tree(Path({str(tmp_path)!r})).write(OPS, OPTIMISED).use()
write_compiled(tree.path(OPS), elsewhere(OPTIMISED))
ops = module()
if ops.f.__code__ == functions(OPTIMISED)["f"] or "opt-" not in ops.__cached__:
    raise SystemExit("not from the compiled file")
engine = engine_for(patch("tenfold", target(tree)))
if engine.apply(strict=True)["tenfold"].state is not State.APPLIED or ops.f(-1) != 0:
    raise SystemExit("not applied")
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MCORE_PATCHES"))}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, flag, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


OPTIMISED = f'def f(x):\n    """Doc."""\n    assert x > 0\n    {REMARK}\n    y = x + 1\n    return y\n'


def theirs(*args):
    return None


def other_function(ops, consumer):
    ops.f = theirs


def other_member(ops, consumer):
    ops.Kernel.forward = theirs


def other_relied_on(ops, consumer):
    consumer.g = theirs


def other_code(ops, consumer):
    """As a tool does that changes functions in place."""
    namespace: dict = {}
    exec(compile(elsewhere(TEXT).replace("x + 1\n", "x + 2\n"), ops.__file__, "exec"), namespace)
    ops.f.__code__ = namespace["f"].__code__


def other_constant(ops, consumer):
    code = ops.f.__code__
    ops.f.__code__ = code.replace(co_consts=tuple(2 if const == 1 else const for const in code.co_consts))


@pytest.mark.parametrize(
    "change",
    [other_function, other_member, other_relied_on, other_code, other_constant],
    ids=lambda change: change.__name__,
)
@isolated()
def test_what_another_tool_changed_is_a_conflict_all_the_same(tmp_path, change):
    tree = compiled_tree(tmp_path)
    ops, consumer = loaded(tree)
    change(ops, consumer)
    before = ops.f
    found = relying(tree).apply()["tenfold"]
    assert found.state is State.CONFLICT
    assert "another tool has changed it" in found.reason
    assert ops.f is before


OTHER = {"f": ("x + 1\n", "x + 2\n"), "Kernel.forward": ("ValueError", "OSError"), "run": ("forward(x)", "forward(5)")}


@pytest.mark.parametrize("kind", ["time", "unchecked"])
@pytest.mark.parametrize("name", OTHER)
@isolated()
def test_a_file_of_another_text_that_python_believes_is_a_conflict(tmp_path, name, kind):
    """Time and size say nothing about the text; an unchecked hash even less."""
    tree = compiled_tree(tmp_path)
    text = elsewhere(TEXT).replace(*OTHER[name])
    assert text != elsewhere(TEXT)
    path = write_compiled(tree.path(OPS), text, kind)
    if kind == "unchecked":
        header = path.read_bytes()
        path.write_bytes(header[:8] + bytes(8) + header[16:])
    ops = module()
    module(CONSUMER)
    found = relying(tree).apply()["tenfold"]
    assert found.state is State.CONFLICT
    assert f"the live {name} is a function at {tree.path(OPS)}:" in found.reason
    assert f"(it may come from {path}: if no tool changed it, remove that file and start Python anew)" in found.reason
    assert ops.f(1) == (3 if name == "f" else 2)


@isolated()
def test_removing_the_file_of_another_text_helps(tmp_path):
    tree = compiled_tree(tmp_path)
    path = write_compiled(tree.path(OPS), TEXT.replace(*OTHER["f"]))
    module(), module(CONSUMER)
    assert relying(tree).apply()["tenfold"].state is State.CONFLICT
    path.unlink()
    del sys.modules[OPS]
    assert module().f(1) == 2
    assert relying(tree).apply(strict=True)["tenfold"].state is State.APPLIED


@pytest.mark.parametrize("change", [other_function, other_member], ids=lambda change: change.__name__)
@isolated()
def test_a_function_from_elsewhere_does_not_come_from_that_file(tmp_path, change):
    tree = compiled_tree(tmp_path)
    ops, consumer = loaded(tree)
    change(ops, consumer)
    assert "remove" not in relying(tree).apply()["tenfold"].reason


@isolated()
def test_without_a_compiled_file_none_is_to_be_removed(tmp_path):
    tree = Tree(tmp_path).write(OPS, TEXT.replace(*OTHER["f"])).write(CONSUMER, CONSUMER_TEXT).use()
    module(), module(CONSUMER)
    tree.write(OPS, TEXT)
    found = relying(tree).apply()["tenfold"]
    assert found.state is State.CONFLICT
    assert "remove" not in found.reason
    module().__spec__ = None
    assert relying(tree).apply()["tenfold"].state is State.CONFLICT


@pytest.mark.parametrize("length", [0, 3, 15])
@isolated()
def test_a_truncated_or_stale_file_is_not_what_runs(tmp_path, length):
    tree = compiled_tree(tmp_path)
    path = write_compiled(tree.path(OPS), TEXT.replace(*OTHER["f"]))
    path.write_bytes(path.read_bytes()[:length])
    os.utime(tree.path(CONSUMER), (1, 1))
    assert (module().f(1), module(CONSUMER).g(1)) == (2, 2)
    assert relying(tree).apply(strict=True)["tenfold"].state is State.APPLIED


@isolated()
def test_this_release_s_own_files(tmp_path):
    tree = Tree(tmp_path).write(OPS, TEXT).write(CONSUMER, CONSUMER_TEXT).use()
    for name in (OPS, CONSUMER):
        py_compile.compile(str(tree.path(name)), doraise=True)
    module(), module(CONSUMER)
    assert relying(tree).apply(strict=True)["tenfold"].state is State.APPLIED
