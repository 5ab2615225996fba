"""Where a target is, in the running interpreter and on disk, and what lies on it there."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from mcore_patches.overlay import fields, imports
from mcore_patches.overlay.fingerprint import SourceError, combined_texts, read_source, source_segment
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
from mcore_patches.overlay.patch import AnyTarget, FieldsTarget, Target, covers
from mcore_patches.overlay.symbols import Symbol, defines, described, where_of


class Site:
    """A target resolved: its module, its text on disk, its live object if the module is imported.

    absent, broken: why there is no text, or none that can be read. lacking: what the replacement relies on and the
    release has not. The live object is looked up anew at each use.
    """

    def __init__(self, target: AnyTarget) -> None:
        self.target = target
        self.module_name: str | None = None
        self.file: str | None = None
        self.absent: str | None = None
        self.broken: str | None = None
        self.fingerprint: str | None = None
        self.line: int | None = None
        self.lacking: str | None = None
        self._text: str | None = None
        self._symbols: tuple[Symbol, ...] = ()
        self._resolve()

    def _resolve(self) -> None:
        unfit, missing = [], []
        for name in self.target.modules:
            found = locate(name)
            if not found.found:
                missing.append(found.reason)
                continue
            self._read(name, found.file)
            if self.absent is None:
                return
            unfit.append(self.absent)
        self.absent = "; ".join(dict.fromkeys(unfit or missing))

    def _read(self, name: str, file: str | None) -> None:
        self.module_name, self.file, self.absent = name, file, None
        if file is None or not file.endswith(".py"):
            self.absent = None if self.module else f"{name} has no source file to read ({file})"
            return
        live = sys.modules.get(name)
        if live is not None and not issubclass(type(live), ModuleType):
            self.absent = f"sys.modules has {described(live)} as {name}, not a module"
            return
        try:
            text = read_source(file)
            segment = source_segment(text, self.target.qualname)
        except SourceError as exc:
            self.broken = f"{file}: {exc.reason}"
            return
        if segment is None:
            self.absent = f"{file} does not define {self.target.qualname}"
            return
        self._text, self.line = text, segment[1]
        own = Symbol(name, self.target.qualname, file, text, self.line)
        relied = [self._symbol(own, *other) for other in covers(self.target, name)[1:]]
        self._symbols = (own, *filter(None, relied))
        if None not in relied:
            self.fingerprint = combined_texts([(s.text, s.qualname) for s in self._symbols])

    def _symbol(self, own: Symbol, module: str, qualname: str) -> Symbol | None:
        """A name that the replacement relies on. None: `lacking` or `broken` says why."""
        file, text, lacks = own.file, own.text, ""
        if module != own.module:
            found = locate(module)
            file, text = found.file or "", ""
            if not file.endswith(".py"):
                lacks = found.reason or f"{module} has no source file to read ({file})"
        try:
            text = text or (read_source(file) if not lacks else "")
            segment = source_segment(text, qualname)
        except SourceError as exc:
            self.broken = f"{file}: {exc.reason}"
            return None
        if segment is None:
            self.lacking = f"relies on {module}:{qualname}, but {lacks or f'{file} does not define it'}"
            return None
        return Symbol(module, qualname, file, text, segment[1])

    @property
    def key(self) -> Key:
        return (self.module_name or self.target.modules[0], self.target.qualname)

    @property
    def module(self) -> ModuleType | None:
        """The live module, once its code has run: until then the target may be redefined, or the import may fail."""
        return _live(self.module_name or "")

    @property
    def underway(self) -> bool:
        """Whether the module's import has begun and not ended, in whatever thread."""
        return self.module_name is not None and imports.underway(self.module_name)

    @property
    def verdict(self) -> str:
        """ "needs", "fixed" or "unknown". Of a dataclass only the fields count: "fixed" when it has them all."""
        if isinstance(self.target, Target):
            return self.target.known.get(self.fingerprint or "", "unknown")
        assert isinstance(self.target, FieldsTarget)
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
        return f"{described(self.current)} wraps the patched {self.target.qualname}"

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
        if callable(live) or (self._text is not None and defines(self._text, self.file or "", name)):
            return None
        return f"{name} is {described(live)}, not a function"

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
                return f"the live {self.target.qualname} is {described(cls)}, not a class"
            if self._text is not None and (cls.__module__, cls.__qualname__) != self.key:
                return f"the live {self.target.qualname} is the class {cls.__module__}.{cls.__qualname__}"
            return None
        if self._text is None:
            return None
        for symbol in self._symbols:
            module = _live(symbol.module)
            if module and (reason := symbol.foreign(module, is_target=symbol is self._symbols[0])):
                return reason
        return None

    def unknown(self) -> str:
        """What is not known about the text, by name and file."""
        elsewhere = [str(s) for s in self._symbols if s.module != self.module_name]
        together = f" together with {', '.join(elsewhere)}" if elsewhere else ""
        name = f"{self.target.qualname} ({self.where()[0]})"
        if self.lacking:
            return f"{name} {self.lacking}"
        return (
            f"{name}{together} has the fingerprint {self.fingerprint[:12]}"
            if self.fingerprint
            else f"{name} is unknown"
        )

    def where(self) -> tuple[str | None, str | None]:
        """ "file:line" of upstream's text and, with layers on it, of the object that runs."""
        before = f"{self.file}:{self.line}" if self.line is not None else self.file
        stack = self.stack
        if stack is None:
            return before, None
        if isinstance(self.target, FieldsTarget):
            return before, "fields " + ", ".join(f.name for f in fields.added(stack.original))
        return before, where_of(self.current)

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


def _live(name: str) -> ModuleType | None:
    module = sys.modules.get(name)
    if module is None or not issubclass(type(module), ModuleType) or imports.running(name):
        return None
    # An import that fails takes its module out before it ceases to be under way.
    return module if sys.modules.get(name) is module else None


def stray_change(stack: Stack, layers: tuple[Layer, ...]) -> AnyChange:
    """The same for a stack whose target is another object by now."""
    carrier: Any = stack.carrier()
    if issubclass(type(carrier), type):
        return FieldsChange(stack.key, carrier, layers, stack.module)
    holder, attribute = home_of(stack) or (None, "")
    seen = carrier if holder is None else names_of(holder)[attribute]
    return Change(stack.key, holder, attribute, carrier, seen, stack.original, stack.raw, stack.module, layers)
