"""Whether two code objects run alike, although not equal: a text compiled by two bugfix releases of one Python.

Code comes from ``__pycache__`` wherever an image or a folder was filled by another bugfix release, whose files have the
same magic number. Such code names other columns, or another line for an implicit return, and has a NOP more or less:
of megatron-core's functions, nearly half are unequal between 3.12.1 and 3.12.10. Where these differences end, so does
the likeness: the same operations on the same names and constants, in the same order, with the same jumps and handlers.
"""

from __future__ import annotations

import dis
from types import CodeType

_JUMPS = frozenset(dis.hasjrel)

# EXTENDED_ARG is a part of the next instruction's argument. A jump over one more NOP may need it.
_FILLERS = frozenset({"NOP", "EXTENDED_ARG"})


def run_alike(one: CodeType, other: CodeType) -> bool:
    """Whether both do the same, nested functions included: equal but for NOPs and for the positions in the text.

    The file name does not count, the first line does. What cannot be shown to be alike is different.
    """
    if one == other:
        return True
    if one.co_name != other.co_name or len(one.co_consts) != len(other.co_consts):
        return False
    consts = tuple(
        theirs if isinstance(ours, CodeType) and isinstance(theirs, CodeType) and run_alike(ours, theirs) else ours
        for ours, theirs in zip(one.co_consts, other.co_consts)
    )
    # Python's own comparison judges all that is not bytecode, e.g. signature, names, and constants by type and sign.
    rest = one.replace(
        co_consts=consts,
        co_code=other.co_code,
        co_linetable=other.co_linetable,
        co_exceptiontable=other.co_exceptiontable,
    )
    if rest != other:
        return False
    if (one.co_code, one.co_exceptiontable) == (other.co_code, other.co_exceptiontable):
        return True
    try:
        return _steps(one) == _steps(other)
    except LookupError:  # bytecode that no compiler made, with a jump to nowhere
        return False


def _steps(code: CodeType) -> list[tuple[object, ...]]:
    """Each operation with its argument and its exception handler; places are counted in operations."""
    place: dict[int, int] = {}
    kept: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        place[instruction.offset] = len(kept)
        if instruction.opname not in _FILLERS:
            kept.append(instruction)
    handlers: list[object] = [None] * len(kept)
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]  # typeshed lacks it
        first, last = place[entry.start], place.get(entry.end, len(kept))
        handlers[first:last] = [(place[entry.target], entry.depth, entry.lasti)] * (last - first)
    return [(i.opcode, place[i.argval] if i.opcode in _JUMPS else i.arg, handler) for i, handler in zip(kept, handlers)]
