"""Names whose text a fingerprint covers, and whether the live object of such a name is what its text defines."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import warnings
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, ModuleType
from typing import Any

from mcore_patches.overlay.codes import run_alike
from mcore_patches.overlay.fingerprint import parse_source
from mcore_patches.overlay.layers import beneath, names_of, stack_on, unwrapped
from mcore_patches.overlay.locate import module_dict


@dataclass(frozen=True)
class Symbol:
    """A name and the text that defines it. line: of its definition, 1-based. file: what that text was read from."""

    module: str
    qualname: str
    file: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.qualname} ({self.file}:{self.line})"

    def foreign(self, module: ModuleType, *, is_target: bool) -> str | None:
        """Why the object in the live module is not what the text defines, or None. Of a constant nothing can be said.

        Of a class the functions that its body defines are compared. A name that the text itself may rebind, as to None
        where a package is missing, may be None, except the target.
        """
        facts = _facts(self.text, self.file, self.qualname)
        if not facts.codes:
            return None
        holder: Any = module
        try:
            for name in self.qualname.split("."):
                holder = names_of(holder)[name]
        except (KeyError, TypeError):
            return f"the imported {self.module} has no {self.qualname}"
        live = unwrapped(holder)
        if not is_target:
            if live is None and facts.wrapped:
                return None
            if issubclass(type(live), type):
                return self._foreign_class(module, live, facts)
        stack = next((s for obj in beneath(live) if (s := stack_on(obj))), None)
        original = stack.original if stack else live
        for seen in beneath(original) if facts.wrapped else (original,):
            if type(seen) is FunctionType and facts.define(seen.__code__):
                return None
        if not is_target and facts.wrapped and _holds(original, facts, depth=2):
            return None
        return self._says(described(original)) + self._stale(module, original)

    def _foreign_class(self, module: ModuleType, live: type, facts: _Facts) -> str | None:
        bodies = [code for code in facts.codes if not _is_function(code)]
        home = (module_dict(module).get("__name__"), self.qualname)
        if not bodies or (live.__module__, live.__qualname__) != home:
            return self._says(f"the class {live.__module__}.{live.__qualname__}")
        if stack_on(live):
            return None  # fields of ours, which come with an __init__ of ours
        members = {
            c.co_name: replace(self, qualname=f"{self.qualname}.{c.co_name}")
            for body in bodies
            for c in body.co_consts
            if isinstance(c, CodeType) and _is_function(c) and c.co_name in vars(live)
        }
        for name, member in members.items():
            wrapped = _facts(self.text, self.file, member.qualname).wrapped
            if wrapped and type(unwrapped(vars(live)[name])) is not FunctionType:
                continue  # a property, or whatever else a decorator makes of a function
            if reason := member.foreign(module, is_target=False):
                return reason
        return None

    def _says(self, live: str) -> str:
        return f"the live {self.qualname} is {live}, not what {self.file} defines"

    def _stale(self, module: ModuleType, live: Any) -> str:
        """What to do where the function may come from a compiled file of another text: Python believes one that has
        the source's time and size, or that says not to look at the source."""
        cached = getattr(module_dict(module).get("__spec__"), "cached", None)
        code = getattr(live, "__code__", None)
        here = isinstance(code, CodeType) and os.path.abspath(code.co_filename) == self.file
        if not here or not isinstance(cached, str) or not os.path.isfile(cached):
            return ""
        return f" (it may come from {cached}: if no tool changed it, remove that file and start Python anew)"


def _holds(obj: Any, facts: _Facts, depth: int) -> bool:
    """Whether an object has one of these functions among its attributes, or theirs: what a compiler's decorator makes
    of a function holds it so, e.g. tilelang.jit."""
    if type(obj) is FunctionType:
        return facts.define(obj.__code__)
    try:
        values = list(vars(obj).values()) if depth else []
    except TypeError:
        return False
    return any(_holds(value, facts, depth - 1) for value in values)


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def described(obj: Any) -> str:
    where = where_of(obj)
    return f"a function at {where}" if where else f"an object of {type(obj).__module__}.{type(obj).__qualname__}"


def where_of(obj: Any) -> str | None:
    """ "file:line" of a function."""
    code = getattr(obj, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else None


def defines(text: str, file: str, qualname: str) -> bool:
    """Whether the text has a def or a class of that name."""
    return bool(_facts(text, file, qualname).codes)


class _Facts:
    """codes: what the interpreter compiles for a name, one code object for each branch that defines it.

    wrapped: whether the text itself wraps the function, by a decorator or by a later assignment to its name.
    """

    def __init__(self, codes: list[CodeType], wrapped: bool) -> None:
        self.codes, self.wrapped = codes, wrapped

    def define(self, live: CodeType) -> bool:
        """Whether a live function's code is the text's, be it compiled by another bugfix release of this Python."""
        return live in self.codes or any(run_alike(live, code) for code in self.codes)


@functools.lru_cache(maxsize=1024)  # of a class, each of its methods has some
def _facts(text: str, file: str, qualname: str) -> _Facts:
    codes = []
    pending = [_compiled(text, file)]
    while pending:
        for const in pending.pop().co_consts:
            if isinstance(const, CodeType):
                if const.co_qualname == qualname:
                    codes.append(const)
                pending.append(const)
    return _Facts(codes, _wrapped_in_text(text, file, qualname))


@functools.lru_cache(maxsize=4)
def _compiled(text: str, file: str) -> CodeType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape in upstream's text is not our caller's concern
        return compile(text, file, "exec", dont_inherit=True)


# Decorators that leave the function what it is, or that `unwrapped` takes off.
_TRANSPARENT = frozenset({"staticmethod", "classmethod", "overload", "override", "final", "abstractmethod"})


def _wrapped_in_text(text: str, file: str, qualname: str) -> bool:
    pending: list[tuple[ast.AST, str]] = [(node, "") for node in parse_source(text, file).body]
    while pending:
        node, scope = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "") for d in node.decorator_list}
            if scope + node.name == qualname and decorators - _TRANSPARENT:
                return True
        elif isinstance(node, ast.ClassDef):
            pending += [(child, f"{scope}{node.name}.") for child in node.body]
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store) and scope + node.id == qualname:
                return True
        elif not isinstance(node, ast.Lambda):
            pending += [(child, scope) for child in ast.iter_child_nodes(node)]
    return False
