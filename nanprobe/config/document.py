"""A YAML file read into nodes that remember their line, with the readings that surprise people taken out.

Plain scalars follow the core schema of YAML 1.2: ``1e-3`` is a number, ``off`` and ``no`` are text (a check that wants
a boolean takes them as one), ``1:30`` and ``2024-01-01`` are text. Duplicate keys are refused, where PyYAML keeps the
last. Anchors, aliases and merge keys work as usual.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from nanprobe.errors import UsageError
from nanprobe.special_file import special_file

__all__ = ["ConfigDumper", "Node", "read_document"]

_INT = re.compile(r"[-+]?(?:[0-9]+(?:_[0-9]{3})*|0x[0-9a-fA-F]+|0o[0-7]+)")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")

_MOST_BYTES = 4 * 2**20
"""Bytes of the largest file that is read as a config: people write some kilobytes."""

_MOST_VALUES = 100_000
"""Values of the largest document, with every alias written out; ten lines of aliases can stand for billions."""

_MOST_DIGITS = 4_000
"""Digits of the largest integer; Python itself reads some more."""

_RESOLVERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("tag:yaml.org,2002:null", _NULL),
    ("tag:yaml.org,2002:bool", _BOOL),
    ("tag:yaml.org,2002:int", _INT),
    ("tag:yaml.org,2002:float", _FLOAT),
    ("tag:yaml.org,2002:merge", re.compile("<<")),
)


def _resolve(value: str) -> str:
    """Return the tag of a plain scalar."""
    for tag, pattern in _RESOLVERS:
        if pattern.fullmatch(value):
            return tag
    return "tag:yaml.org,2002:str"


class _CoreSchema:
    """The scalar rules of this module, for PyYAML's composer and for its dumper."""

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: tuple[bool, bool]) -> str:
        """Return the tag of a node without an explicit one; ``implicit[0]`` is true for an unquoted scalar."""
        if kind is yaml.ScalarNode:
            return _resolve(value or "") if implicit[0] else "tag:yaml.org,2002:str"
        return "tag:yaml.org,2002:map" if kind is yaml.MappingNode else "tag:yaml.org,2002:seq"


class _Loader(_CoreSchema, yaml.SafeLoader):
    """PyYAML's parser and composer; it constructs nothing."""


class ConfigDumper(_CoreSchema, yaml.SafeDumper):
    """A dumper that quotes exactly what :func:`read_document` would otherwise read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value out in full."""
        return True


@dataclass(frozen=True, slots=True)
class Node:
    """One value of the document: a scalar, a list of nodes or a mapping of text to nodes, and the line it starts at.

    ``plain`` is true for a scalar written without quotes.
    """

    value: Any
    line: int
    plain: bool = False

    def data(self) -> Any:
        """Return the value with all nodes in it replaced by what they hold."""
        if isinstance(self.value, dict):
            return {key: node.data() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.data() for node in self.value]
        return self.value


class _Builder:
    """Turns composed YAML nodes into :class:`Node`; each is built once, however many aliases point to it."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.built: dict[int, Node] = {}
        self.sizes: dict[int, int] = {}
        self.open: set[int] = set()

    def fail(self, node: yaml.Node, text: str) -> NoReturn:
        raise UsageError(f"{self.source}:{node.start_mark.line + 1}: {text}")

    def build(self, node: yaml.Node) -> Node:
        if id(node) in self.open:
            self.fail(node, "an alias that contains itself")
        if id(node) not in self.built:
            self.open.add(id(node))
            self.built[id(node)] = self._build(node)
            self.open.discard(id(node))
            # The parts are built, and so counted, before the whole.
            self.sizes[id(node)] = 1 + sum(self.sizes.get(id(part), 1) for part in _parts(node))
            if self.sizes[id(node)] > _MOST_VALUES:
                self.fail(node, f"more than {_MOST_VALUES:,} values once its aliases are written out; no config is")
        return self.built[id(node)]

    def _build(self, node: yaml.Node) -> Node:
        line = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            return Node(self._mapping(node), line)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.build(child) for child in node.value], line)
        assert isinstance(node, yaml.ScalarNode)
        return Node(self._scalar(node), line, plain=node.style is None)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for name, value in self._merge(value_node).items():
                    merged.setdefault(name, value)
                continue
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                self.fail(key_node, f"a key must be text; put quotes around {getattr(key_node, 'value', 'it')!r}")
            if key in own:
                self.fail(key_node, f"duplicate key `{key}`; it stands at line {own[key].line} already")
            value = self.build(value_node)
            own[key] = Node(value.value, key_node.start_mark.line + 1, value.plain)
        return {**merged, **own}

    def _merge(self, node: yaml.Node) -> dict[str, Node]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Node] = {}
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                self.fail(source, "`<<` merges mappings only")
            for name, value in self.build(source).value.items():
                merged.setdefault(name, value)
        return merged

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text = str(node.value)
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind in ("str", "merge"):
            return text
        if kind == "null":
            return None
        if kind == "bool" and _BOOL.fullmatch(text):
            return text.lower() == "true"
        if kind in ("int", "float") and len(text) > _MOST_DIGITS:
            self.fail(node, f"a number of {len(text):,} digits")
        if kind == "int" and _INT.fullmatch(text):
            digits = text.replace("_", "")
            return int(digits, 0) if "x" in digits or "o" in digits else int(digits)
        if kind == "float" and (_FLOAT.fullmatch(text) or _INT.fullmatch(text)):
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan").replace("_", ""))
        return self.fail(node, f"the tag `{node.tag}` is not supported here")


def _parts(node: yaml.Node) -> list[yaml.Node]:
    """Return the nodes right below a node."""
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def read_document(source: Path) -> Node:
    """Read a YAML file into nodes; UsageError, naming file and line, when it cannot be read or is no YAML."""
    special = special_file(source)
    if special is not None:
        raise UsageError(f"{source}: {special}, where a config file is expected")
    try:
        with source.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{source}: no such config file") from None
    except IsADirectoryError:
        raise UsageError(f"{source}: a folder, where a config file is expected") from None
    except OSError as error:
        raise UsageError(f"{source}: cannot read the config file: {error.strerror or error}") from None
    except ValueError:
        raise UsageError(f"{source}: no file can have this name") from None
    if len(content) > _MOST_BYTES:
        raise UsageError(f"{source}: larger than {_MOST_BYTES // 2**20} MiB; is this the config file?")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not a text file in UTF-8 (byte {error.start}); is this the config file?") from None
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{source}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UsageError(f"{source}: nested too deeply to be a config file") from None
    if node is None:
        raise UsageError(f"{source}: the config file is empty; it needs at least a `model`")
    try:
        return _Builder(source).build(node)
    except RecursionError:
        raise UsageError(f"{source}: nested too deeply to be a config file") from None
