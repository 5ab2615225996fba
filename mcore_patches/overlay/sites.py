"""Where a target is, in the running interpreter and on disk, and what lies on it there."""

from __future__ import annotations

import ast
import functools
import sys
import warnings
from types import CodeType, FunctionType, ModuleType
from typing import Any

from mcore_patches.overlay import fields, imports
from mcore_patches.overlay.fingerprint import SourceError, combined, parse_source, read_source, source_segment
from mcore_patches.overlay.layers import (
    AnyChange,
    Change,
    FieldsChange,
    Key,
    Layer,
    Stack,
    beneath,
    home_of,
    names_of,
    stack_on,
    unwrapped,
)
from mcore_patches.overlay.locate import locate
from mcore_patches.overlay.patch import AnyTarget, FieldsTarget, Target


class Site:
    """A target resolved: its module, its text on disk, its live object if the module is imported.

    absent, broken: why there is no text, or none that can be read. The live object is looked up anew at each use.
    """

    def __init__(self, target: AnyTarget) -> None:
        self.target = target
        self.module_name: str | None = None
        self.file: str | None = None
        self.absent: str | None = None
        self.broken: str | None = None
        self.fingerprint: str | None = None
        self.line: int | None = None
        self._text: str | None = None
        self._resolve()

    def _resolve(self) -> None:
        reasons = []
        for name in self.target.modules:
            found = locate(name)
            if found.found:
                self.module_name, self.file = name, found.file
                break
            reasons.append(found.reason)
        else:
            self.absent = "; ".join(dict.fromkeys(reasons))
            return
        if self.file is None or not self.file.endswith(".py"):
            self.absent = None if self.module else f"{self.module_name} has no source file to read ({self.file})"
            return
        live = sys.modules.get(self.module_name)
        if live is not None and not issubclass(type(live), ModuleType):
            self.absent = f"sys.modules has {_described(live)} as {self.module_name}, not a module"
            return
        try:
            self._text = read_source(self.file)
            segment = source_segment(self._text, self.target.qualname)
        except SourceError as exc:
            self.broken = f"{self.file}: {exc.reason}"
            return
        if segment is None:
            self.absent = f"{self.file} does not define {self.target.qualname}"
            return
        self.line = segment[1]
        relies_on = self.target.relies_on if isinstance(self.target, Target) else ()
        self.fingerprint = combined(self._text, (self.target.qualname, *relies_on))

    @property
    def key(self) -> Key:
        return (self.module_name or self.target.modules[0], self.target.qualname)

    @property
    def module(self) -> ModuleType | None:
        """The live module, once its code has run: until then the target may be redefined, or the import may fail."""
        name = self.module_name or ""
        module = sys.modules.get(name)
        if not issubclass(type(module), ModuleType) or imports.running(name):
            return None
        # An import that fails takes its module out before it ceases to be under way.
        return module if sys.modules.get(name) is module else None

    @property
    def underway(self) -> bool:
        """Whether the module's import has begun and not ended, in whatever thread."""
        return self.module_name is not None and imports.underway(self.module_name)

    @property
    def verdict(self) -> str:
        """ "needs", "fixed" or "unknown". Of a dataclass only the fields count: "fixed" when it has them all."""
        if isinstance(self.target, Target):
            return self.target.known.get(self.fingerprint or "", "unknown")
        names = [f.name for f in self.target.fields]
        if self.module is not None:
            own = [] if self.missing_live() else fields.native(self.current, names)
        else:
            own = [n for n in names if source_segment(self._text or "", f"{self.target.qualname}.{n}")]
        return "needs" if not own else "fixed" if len(own) == len(names) else "unknown"

    # The live object -------------------------------------------------------------------------------------------------

    def _holder(self) -> tuple[Any, str]:
        holder: Any = self.module
        *outer, attribute = self.target.qualname.split(".")
        for name in outer:
            holder = names_of(holder)[name]
        return holder, attribute

    @property
    def raw(self) -> Any:
        """What the holder's dictionary has: the function, perhaps within a staticmethod. KeyError if absent."""
        holder, attribute = self._holder()
        return names_of(holder)[attribute]

    @property
    def current(self) -> Any:
        return unwrapped(self.raw)

    @property
    def stack(self) -> Stack | None:
        """The layers on the live object, also below another tool's wrapper. None: upstream's own, or not imported."""
        if self.module is None:
            return None
        try:
            current = self.current
        except (KeyError, TypeError):
            return None
        return next((stack for obj in beneath(current) if (stack := stack_on(obj))), None)

    @property
    def original(self) -> Any:
        stack = self.stack
        return self.current if stack is None else stack.original

    def covered(self) -> str | None:
        """Which wrapper of another tool lies on top of our layers."""
        stack = self.stack
        if stack is None or stack.carrier() is self.current:
            return None
        return f"{_described(self.current)} wraps the patched {self.target.qualname}"

    def missing_live(self) -> str | None:
        """Why the imported module lacks what its text defines (deleted, or defined on a branch not taken)."""
        if self.module is None:
            return None
        try:
            _ = self.raw
        except (KeyError, TypeError):
            return f"{self.module_name} is imported but has no {self.target.qualname}"
        return None

    def unfit(self) -> str | None:
        """Why the text itself binds the target to something that no function can stand in for, or None."""
        if self.module is None or isinstance(self.target, FieldsTarget):
            return None
        live, name = self.original, self.target.qualname
        if issubclass(type(live), type) and (live.__module__, live.__qualname__) == self.key:
            return f"{name} is a class; classes are changed in place, by targets that name their methods"
        if callable(live) or (self._text is not None and _facts(self._text, self.file or "", name).codes):
            return None
        return f"{name} is {_described(live)}, not a function"

    def foreign(self) -> str | None:
        """Why the live original is not what the file on disk defines: another tool replaced it, or the file changed.

        The same is asked of the names that the replacement relies on.
        """
        if self.module is None:
            return None
        if covered := self.covered():
            return covered
        if isinstance(self.target, FieldsTarget):
            cls = self.current
            if not issubclass(type(cls), type):
                return f"the live {self.target.qualname} is {_described(cls)}, not a class"
            if self._text is not None and (cls.__module__, cls.__qualname__) != self.key:
                return f"the live {self.target.qualname} is the class {cls.__module__}.{cls.__qualname__}"
            return None
        if self._text is None:
            return None
        for qualname in (self.target.qualname, *self.target.relies_on):
            if reason := self._foreign_function(qualname):
                return reason
        return None

    def _foreign_function(self, qualname: str) -> str | None:
        assert self._text is not None
        facts = _facts(self._text, self.file or "", qualname)
        if not facts.codes:
            return None  # a constant or a class
        holder: Any = self.module
        try:
            for name in qualname.split("."):
                holder = names_of(holder)[name]
        except (KeyError, TypeError):
            return f"the imported {self.module_name} has no {qualname}"
        live = unwrapped(holder)
        if issubclass(type(live), type) and qualname != self.target.qualname:
            return None  # the text of a class that the replacement relies on is in the fingerprint
        stack = next((s for obj in beneath(live) if (s := stack_on(obj))), None)
        original = stack.original if stack else live
        for seen in beneath(original) if facts.wrapped else (original,):
            if type(seen) is FunctionType and seen.__code__ in facts.codes:
                return None
        return f"the live {qualname} is {_described(original)}, not what {self.file} defines"

    def where(self) -> tuple[str | None, str | None]:
        """ "file:line" of upstream's text and, with layers on it, of the object that runs."""
        before = f"{self.file}:{self.line}" if self.line is not None else self.file
        stack = self.stack
        if stack is None:
            return before, None
        if isinstance(self.target, FieldsTarget):
            return before, "fields " + ", ".join(f.name for f in fields.added(stack.original))
        return before, _where(self.current)

    # Changes to it ---------------------------------------------------------------------------------------------------

    def change(self, layers: tuple[Layer, ...]) -> AnyChange:
        """What would make exactly these layers lie on the live target. No layers: upstream's object is back."""
        assert self.module is not None
        if isinstance(self.target, FieldsTarget):
            return FieldsChange(self.key, self.current, layers, self.module)
        stack, raw = self.stack, self.raw
        holder, attribute = self._holder()
        return Change(
            key=self.key,
            holder=holder,
            attribute=attribute,
            before=self.current,
            seen=raw,
            original=stack.original if stack else self.current,
            raw=stack.raw if stack else raw,
            module=self.module,
            layers=layers,
        )


def stray_change(stack: Stack, layers: tuple[Layer, ...]) -> AnyChange:
    """The same for a stack whose target is another object by now."""
    carrier: Any = stack.carrier()
    if issubclass(type(carrier), type):
        return FieldsChange(stack.key, carrier, layers, stack.module)
    holder, attribute = home_of(stack) or (None, "")
    seen = carrier if holder is None else names_of(holder)[attribute]
    return Change(stack.key, holder, attribute, carrier, seen, stack.original, stack.raw, stack.module, layers)


def _described(obj: Any) -> str:
    where = _where(obj)
    return f"a function at {where}" if where else f"an object of {type(obj).__module__}.{type(obj).__qualname__}"


def _where(obj: Any) -> str | None:
    code = getattr(obj, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else None


class _Facts:
    """codes: what the interpreter compiles for a name, one code object for each branch that defines it.

    wrapped: whether the text itself wraps the function, by a decorator or by a later assignment to its name.
    """

    def __init__(self, codes: list[CodeType], wrapped: bool) -> None:
        self.codes, self.wrapped = codes, wrapped


@functools.lru_cache(maxsize=64)
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
