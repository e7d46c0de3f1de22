"""A pickle machine that builds inert values: nothing in the file is imported, constructed or called.

Python's own unpickler runs whatever callables a file names. This one has none to run: REDUCE, NEWOBJ, INST and OBJ
make a record of the call, BUILD and the SET and APPEND families fill plain lists, dictionaries and those records.
What it allocates is bounded by the bytes it has read: lengths are checked against the bytes left, long strings are
left in the file as spans, memo entries live in a dictionary, and the number of operations is capped.

Opcodes: CPython's Lib/pickletools.py, protocols 0 to 5.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanprobe.checkpoints.inert import Foreign, Global, InertDict, Span
from nanprobe.checkpoints.pickle_source import BLOCK, PickleSource

__all__ = ["DEFAULT_LIMITS", "Limits", "Loaded", "PickleDamage", "load_pickle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one pickle may use: operations; bytes of a kept string, a line, an integer; open marks; items copied.

    Its objects may take ``memory`` bytes, and no more than ``base_memory`` and ``ratio`` times its own size: what a
    trainer writes takes some 10 times its size, and a pickle of ten megabytes made to do harm asks for a hundred times.
    """

    operations: int = 30_000_000
    memory: int = 1 << 30
    base_memory: int = 48 << 20
    ratio: int = 24
    string: int = 1 << 16
    line: int = 1 << 16
    integer: int = 1 << 10
    marks: int = 10_000
    copies: int = 1 << 20


DEFAULT_LIMITS = Limits()
"""Thirty million operations hold some 700,000 tensors; a checkpoint of 50,000 tensors takes two million."""


class PickleDamage(Exception):
    """The bytes are no pickle, or one beyond the limits; ``truncated`` is true when they end too early."""

    def __init__(self, message: str, *, truncated: bool = False) -> None:
        super().__init__(message)
        self.truncated = truncated


@dataclass(slots=True)
class Loaded:
    """The value a pickle describes, where it ends, and every class and function it names, in order, without repeats."""

    value: Any
    end: int
    foreign: dict[str, None] = field(default_factory=dict)


def load_pickle(
    source: PickleSource,
    *,
    persistent: Callable[[Any], Any] | None = None,
    builders: dict[str, Callable[[tuple[Any, ...]], Any]] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Loaded:
    """Read one pickle from ``source`` and return what it describes; PickleDamage when that cannot be done.

    ``persistent`` turns a persistent id into a value. ``builders`` turn the arguments of a call into a value, by the
    dotted name of what is called; they must allocate no more than they are given. Any other call becomes a Foreign.
    """
    machine = _Machine(source, persistent, builders or {}, limits)
    try:
        return machine.run()
    except struct.error:
        raise PickleDamage("its pickle ends in the middle", truncated=True) from None
    except IndexError:
        if machine.at >= source.end:
            raise PickleDamage("its pickle ends in the middle", truncated=True) from None
        raise PickleDamage(f"its pickle takes from an empty stack before byte {machine.at:,}") from None
    except (ValueError, TypeError, KeyError, OverflowError, UnicodeError, AttributeError, RecursionError) as error:
        raise PickleDamage(f"its pickle makes no sense before byte {machine.at:,} ({type(error).__name__})") from None


class _Machine:
    """State of one run: the block being read, the stack with its marks, the memo."""

    def __init__(
        self,
        source: PickleSource,
        persistent: Callable[[Any], Any] | None,
        builders: dict[str, Callable[[tuple[Any, ...]], Any]],
        limits: Limits,
    ) -> None:
        self.source = source
        self.data = source.data
        self.pos = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.foreign: dict[str, None] = {}
        self.persistent = persistent
        self.builders = builders
        self.limits = limits
        self.copied = 0
        size = max(source.end - source.base, 0)
        self.memory = min(limits.memory, limits.base_memory + limits.ratio * size)

    @property
    def at(self) -> int:
        """Position in the source of the next byte."""
        return self.source.base + self.pos

    def run(self) -> Loaded:
        """Go through the operations up to STOP."""
        table, memo = _TABLE, self.memo
        for _ in range(self.limits.operations):
            pos = self.pos
            if pos + 16 > len(self.data):
                self._refill(16)
                pos = self.pos
            data = self.data
            code = data[pos]
            # The commonest operations by far are done here and not by a call: recalling and remembering.
            if code == _BINGET:
                self.pos = pos + 2
                self.recall(data[pos + 1])
                continue
            if code in (_BINPUT, _MEMOIZE):
                self.memory -= _MEMO
                if self.memory < 0:
                    self.charge(0)
                if code == _MEMOIZE:
                    self.pos = pos + 1
                    memo[len(memo)] = self.stack[-1]
                else:
                    self.pos = pos + 2
                    memo[data[pos + 1]] = self.stack[-1]
                continue
            self.pos = pos + 1
            if code == _STOP:
                return Loaded(self.stack.pop(), self.at, self.foreign)
            action = table.get(code)
            if action is None:
                raise PickleDamage(f"byte {self.at - 1:,} of its pickle is no known operation (0x{code:02x})")
            action(self)
        raise PickleDamage(f"its pickle has more than {self.limits.operations:,} operations, which is the limit")

    def charge(self, size: int) -> None:
        """Account for an object of about ``size`` bytes (CPython 3.11, 64 bits); PickleDamage beyond the limit."""
        self.memory -= size
        if self.memory < 0:
            raise PickleDamage("its pickle describes objects that need far more memory than a checkpoint's do")

    # Bytes

    def _refill(self, need: int) -> None:
        if self.source.base + len(self.data) < self.source.end:
            self.source.advance(self.at, need)
            self.data = self.source.data
            self.pos = 0

    def take(self, length: int) -> bytes:
        """Return the next ``length`` bytes."""
        if length > self.source.end - self.at:
            raise PickleDamage(
                f"its pickle claims a string of {length:,} bytes where {self.source.end - self.at:,} are left",
                truncated=True,
            )
        if self.pos + length > len(self.data):
            self._refill(length)
        part = self.data[self.pos : self.pos + length]
        self.pos += length
        return part

    def number(self, form: str, length: int) -> int:
        """Return a little-endian integer."""
        value: int = struct.unpack_from(form, self.data, self.pos)[0]
        self.pos += length
        return value

    def line(self) -> str:
        """Return the text up to the next newline."""
        return self.raw_line().decode("utf-8", "surrogateescape")

    def raw_line(self) -> bytes:
        """Return the bytes up to the next newline."""
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            self._refill(self.limits.line)
            end = self.data.find(b"\n", self.pos, self.pos + self.limits.line)
            if end < 0:
                raise PickleDamage("a line of its pickle does not end", truncated=len(self.data) < BLOCK)
        part = self.data[self.pos : end]
        self.pos = end + 1
        return part

    def string(self, length: int, *, text: bool, python2: bool = False) -> None:
        """Push a string of ``length`` bytes, as a span when it is long; one of Python 2 may be text or bytes."""
        if length > self.limits.string:
            left = self.source.end - self.at
            if length > left:
                raise PickleDamage(
                    f"its pickle claims a string of {length:,} bytes where {left:,} are left", truncated=True
                )
            self.charge(_OBJECT)
            self.stack.append(Span(self.at, length, text))
            self.pos += length
            if self.pos > len(self.data):
                self._refill(16)
            return
        part = self.take(length)
        self.charge(60 + length)
        if python2:
            self.stack.append(_text_or_bytes(part))
        else:
            self.stack.append(part.decode("utf-8", "surrogatepass") if text else part)

    # Stack

    def pop_mark(self) -> list[Any]:
        """Return what was pushed since the last mark."""
        if not self.marks:
            raise PickleDamage(f"its pickle has no mark where one is needed, before byte {self.at:,}")
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def remember(self, index: int) -> None:
        """Put the top of the stack into the memo."""
        if index < 0:
            raise PickleDamage("its pickle has a negative memo index")
        self.charge(_MEMO)
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        """Push a memo entry."""
        if index not in self.memo:
            raise PickleDamage(f"its pickle refers to memo entry {index}, which does not exist")
        self.stack.append(self.memo[index])

    # Objects

    def find(self, module: Any, name: Any) -> Global:
        """Return the stand-in for a class or function; it is noted and never looked up."""
        if not isinstance(module, str) or not isinstance(name, str):
            module, name = "?", "?"
        found = Global(_PYTHON2_MODULES.get(module, module), name)
        dotted = found.dotted
        self.charge(_OBJECT + 2 * len(dotted) + (0 if dotted in self.foreign else 2 * _OBJECT))
        self.foreign[dotted] = None
        return found

    def call(self, callee: Any, args: Any) -> Any:
        """Return the record of a call."""
        self.charge(_CALL)
        if isinstance(callee, Global) and isinstance(args, tuple):
            name = callee.dotted
            builder = self.builders.get(name)
            if builder is not None:
                return builder(args)
            if name in _MAPPINGS:
                return self._mapping(args)
            if name in ("builtins.set", "builtins.frozenset", "builtins.list") and len(args) == 1:
                return args[0]
            if name == "builtins.getattr" and len(args) == 2 and isinstance(args[0], Global):
                if isinstance(args[1], str) and len(args[0].name) + len(args[1]) <= self.limits.line:
                    return self.find(args[0].module, f"{args[0].name}.{args[1]}")
            elif name == "builtins.getattr" and len(args) >= 2 and isinstance(args[1], str):
                self.find("?", args[1])
            elif name in ("copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__") and args:
                return Foreign(args[0], args[1:])
        return Foreign(callee, args)

    def _mapping(self, args: tuple[Any, ...]) -> InertDict:
        made = InertDict()
        for given in args:
            if isinstance(given, (dict, list, tuple)):
                self.copied += len(given)
                self.charge(_ITEM * len(given))
                if self.copied > self.limits.copies:
                    raise PickleDamage("its pickle copies more items than the limit allows")
                pairs = given.items() if isinstance(given, dict) else given
                for pair in pairs:
                    if isinstance(pair, (list, tuple)) and len(pair) == 2:
                        made[_key(pair[0])] = pair[1]
        return made

    def store(self, target: Any, items: list[Any]) -> None:
        """Put key and value pairs into ``target``."""
        if len(items) % 2:
            raise PickleDamage("its pickle sets a key without a value")
        if isinstance(target, Foreign):
            if target.pairs is None:
                target.pairs = {}
            pairs = target.pairs
        elif isinstance(target, dict):
            pairs = target
        else:
            raise PickleDamage(f"its pickle sets an item of a {type(target).__name__}")
        for index in range(0, len(items), 2):
            pairs[_key(items[index])] = items[index + 1]
        self.charge(_ITEM * (len(items) // 2))

    def extend(self, target: Any, items: list[Any]) -> None:
        """Append ``items`` to ``target``."""
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Foreign):
            if target.items is None:
                target.items = []
            target.items.extend(items)
        else:
            raise PickleDamage(f"its pickle appends to a {type(target).__name__}")

    def build(self) -> None:
        """Give the object below the top of the stack its state."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, (Foreign, InertDict)):
            target.state = state


def _key(value: Any) -> Any:
    """Return ``value`` when it is safe to hash, else a stand-in that hashes by identity.

    Huge integers and long or nested tuples can be chosen to collide, and hashing deep nesting recurses in C.
    """
    kind = type(value)
    if kind is str or value is None or kind is bool or kind is float or kind is bytes:
        return value
    if kind is int and -(1 << 60) < value < 1 << 60:
        return value
    if (
        kind is tuple
        and len(value) <= 4
        and all(type(part) in (str, int, bool) and _key(part) is part for part in value)
    ):
        return value
    if isinstance(value, (Global, Foreign, Span)):
        return value
    return Foreign(Global("builtins", kind.__name__), (value,))


_LIST, _DICT, _TUPLE, _ITEM, _MEMO, _OBJECT, _CALL = 96, 240, 64, 60, 110, 120, 220
"""Bytes that are charged for a container, an item of a dictionary, an entry of the memo, a stand-in, a call."""

_MAPPINGS = frozenset({"collections.OrderedDict", "collections.Counter", "collections.defaultdict", "builtins.dict"})

_PYTHON2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}

_STOP, _BINGET, _BINPUT, _MEMOIZE = ord("."), ord("h"), ord("q"), 0x94


def _unsupported(what: str) -> Callable[[_Machine], None]:
    def action(machine: _Machine) -> None:
        raise PickleDamage(f"its pickle uses {what}, which a file cannot hold")

    return action


def _push(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _push_new(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    size = _DICT if make is dict else _LIST

    def action(machine: _Machine) -> None:
        machine.charge(size)
        machine.stack.append(make())

    return action


def _push_number(form: str) -> Callable[[_Machine], None]:
    length = struct.calcsize(form)
    return lambda machine: machine.stack.append(machine.number(form, length))


def _string(form: str, *, text: bool, python2: bool = False) -> Callable[[_Machine], None]:
    length = struct.calcsize(form)
    return lambda machine: machine.string(machine.number(form, length), text=text, python2=python2)


def _text_or_bytes(part: bytes) -> str | bytes:
    try:
        return part.decode("utf-8")
    except UnicodeDecodeError:
        return part


def _mark(machine: _Machine) -> None:
    if len(machine.marks) >= machine.limits.marks:
        raise PickleDamage(f"its pickle is nested deeper than {machine.limits.marks:,} levels")
    machine.marks.append(machine.stack)
    machine.stack = []


def _pop(machine: _Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _pop_marked(machine: _Machine) -> None:
    machine.pop_mark()


def _decimal(machine: _Machine) -> None:
    text = machine.line()
    if text in ("00", "01"):
        machine.stack.append(text == "01")
    else:
        machine.stack.append(int(text.removesuffix("L")))


def _long(form: str) -> Callable[[_Machine], None]:
    length = struct.calcsize(form)

    def action(machine: _Machine) -> None:
        size = machine.number(form, length)
        if not 0 <= size <= machine.limits.integer:
            raise PickleDamage(f"its pickle holds an integer of {size:,} bytes")
        machine.stack.append(int.from_bytes(machine.take(size), "little", signed=True))

    return action


def _quoted(machine: _Machine) -> None:
    part = machine.raw_line().strip()
    if len(part) < 2 or part[:1] != part[-1:] or part[:1] not in (b"'", b'"'):
        raise PickleDamage(f"a string of its pickle has no quotes, before byte {machine.at:,}")
    machine.stack.append(_text_or_bytes(codecs.escape_decode(part[1:-1])[0]))


def _tuple(length: int) -> Callable[[_Machine], None]:
    def action(machine: _Machine) -> None:
        stack = machine.stack
        if len(stack) < length:
            raise IndexError
        machine.charge(_TUPLE)
        items = tuple(stack[-length:])
        del stack[-length:]
        stack.append(items)

    return action


def _tuple_of_marked(machine: _Machine) -> None:
    items = tuple(machine.pop_mark())
    machine.charge(_TUPLE + 8 * len(items))
    machine.stack.append(items)


def _list_of_marked(machine: _Machine) -> None:
    items = machine.pop_mark()
    machine.charge(_LIST + 8 * len(items))
    machine.stack.append(items)


def _dict_of_marked(machine: _Machine) -> None:
    items = machine.pop_mark()
    machine.charge(_DICT)
    made: dict[Any, Any] = {}
    machine.store(made, items)
    machine.stack.append(made)


def _set_item(machine: _Machine) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    machine.store(machine.stack[-1], [key, value])


def _set_items(machine: _Machine) -> None:
    items = machine.pop_mark()
    machine.store(machine.stack[-1], items)


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    machine.extend(machine.stack[-1], [value])


def _appends(machine: _Machine) -> None:
    items = machine.pop_mark()
    machine.extend(machine.stack[-1], items)


def _global(machine: _Machine) -> None:
    module = machine.line()
    machine.stack.append(machine.find(module, machine.line()))


def _stack_global(machine: _Machine) -> None:
    name = machine.stack.pop()
    machine.stack.append(machine.find(machine.stack.pop(), name))


def _reduce(machine: _Machine) -> None:
    args = machine.stack.pop()
    callee = machine.stack.pop()
    machine.stack.append(machine.call(callee, args))


def _new_object_with_keywords(machine: _Machine) -> None:
    keywords = machine.stack.pop()
    args = machine.stack.pop()
    machine.charge(_CALL)
    machine.stack.append(Foreign(machine.stack.pop(), args, keywords))


def _inst(machine: _Machine) -> None:
    module = machine.line()
    found = machine.find(module, machine.line())
    args = tuple(machine.pop_mark())
    machine.stack.append(machine.call(found, args))


def _obj(machine: _Machine) -> None:
    items = machine.pop_mark()
    machine.stack.append(machine.call(items[0], tuple(items[1:])))


def _extension(form: str) -> Callable[[_Machine], None]:
    length = struct.calcsize(form)
    return lambda machine: machine.stack.append(machine.find("copyreg", f"extension_{machine.number(form, length)}"))


def _persistent(machine: _Machine, identifier: Any) -> None:
    if machine.persistent is None:
        machine.stack.append(Foreign(Global("pickle", "persistent_id"), (identifier,)))
    else:
        machine.stack.append(machine.persistent(identifier))


def _skip(length: int) -> Callable[[_Machine], None]:
    def action(machine: _Machine) -> None:
        machine.take(length)

    return action


_TABLE: dict[int, Callable[[_Machine], None]] = {
    ord(code): action
    for code, action in {
        "(": _mark,
        "0": _pop,
        "1": _pop_marked,
        "2": lambda machine: machine.stack.append(machine.stack[-1]),
        "I": _decimal,
        "L": _decimal,
        "F": lambda machine: machine.stack.append(float(machine.line())),
        "S": _quoted,
        "V": lambda machine: machine.stack.append(machine.raw_line().decode("raw-unicode-escape")),
        "N": _push(None),
        "\x88": _push(True),
        "\x89": _push(False),
        "J": _push_number("<i"),
        "K": _push_number("<B"),
        "M": _push_number("<H"),
        "G": _push_number(">d"),
        "\x8a": _long("<B"),
        "\x8b": _long("<i"),
        "U": _string("<B", text=True, python2=True),
        "T": _string("<I", text=True, python2=True),
        "B": _string("<I", text=False),
        "C": _string("<B", text=False),
        "\x8e": _string("<Q", text=False),
        "X": _string("<I", text=True),
        "\x8c": _string("<B", text=True),
        "\x8d": _string("<Q", text=True),
        "\x96": _string("<Q", text=False),
        "\x97": _unsupported("out-of-band buffers"),
        "\x98": lambda machine: None,
        ")": _push(()),
        "t": _tuple_of_marked,
        "\x85": _tuple(1),
        "\x86": _tuple(2),
        "\x87": _tuple(3),
        "]": _push_new(list),
        "l": _list_of_marked,
        "}": _push_new(dict),
        "d": _dict_of_marked,
        "\x8f": _push_new(list),
        "\x90": _appends,
        "\x91": _list_of_marked,
        "a": _append,
        "e": _appends,
        "s": _set_item,
        "u": _set_items,
        "c": _global,
        "\x93": _stack_global,
        "R": _reduce,
        "\x81": _reduce,
        "\x92": _new_object_with_keywords,
        "i": _inst,
        "o": _obj,
        "b": lambda machine: machine.build(),
        "p": lambda machine: machine.remember(int(machine.line())),
        "q": lambda machine: machine.remember(machine.number("<B", 1)),
        "r": lambda machine: machine.remember(machine.number("<I", 4)),
        "\x94": lambda machine: machine.remember(len(machine.memo)),
        "g": lambda machine: machine.recall(int(machine.line())),
        "h": lambda machine: machine.recall(machine.number("<B", 1)),
        "j": lambda machine: machine.recall(machine.number("<I", 4)),
        "P": lambda machine: _persistent(machine, machine.line()),
        "Q": lambda machine: _persistent(machine, machine.stack.pop()),
        "\x82": _extension("<B"),
        "\x83": _extension("<H"),
        "\x84": _extension("<i"),
        "\x80": _skip(1),
        "\x95": _skip(8),
    }.items()
}
