"""Which rules and mechanisms the sources can put into a report, read from the sources themselves.

Found are: the keywords and the assignments `rule` and `mechanism`, defaults of fields of these names, what is passed by
position to a parameter called so, tuples that unpack into such a name, and what functions named after them return.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "nanprobe"
NAMES = ("rule", "mechanism")
SEVERITIES = {"error", "warning", "note"}
LIKE_A_NAME = re.compile(r"[a-z]+(-[a-z]+)*")

Places = dict[str, set[tuple[int, int]]]
"""Functions: at which position they take a rule or a mechanism, and how many arguments they must be given."""


def constants(node: ast.expr | None) -> Iterator[str]:
    """Yield the texts that an expression can be, through conditions; what is filled in later is a `*`."""
    match node:
        case ast.Constant(value=str(text)) if LIKE_A_NAME.fullmatch(text):
            yield text
        case ast.IfExp(body=body, orelse=other):
            yield from constants(body)
            yield from constants(other)
        case ast.JoinedStr(values=values):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in values)
            if LIKE_A_NAME.fullmatch(text.replace("*", "x")):
                yield text
        case ast.BoolOp(values=values):
            for value in values:
                yield from constants(value)


def places_of(trees: list[ast.Module]) -> Places:
    """Return the functions of the package that are told a rule or a mechanism by position."""
    places: Places = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                arguments = [each.arg for each in node.args.args if each.arg not in ("self", "cls")]
                required = len(arguments) - len(node.args.defaults)
                for at, argument in enumerate(arguments):
                    if argument in NAMES:
                        places.setdefault(node.name, set()).add((at, required))
    return places


def emitted_by(tree: ast.Module, places: Places) -> Iterator[str]:
    """Yield every rule and mechanism that one source file names."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=function, args=arguments, keywords=keywords):
                for keyword in keywords:
                    if keyword.arg in NAMES:
                        yield from constants(keyword.value)
                called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                for at, required in places.get(called, ()):
                    if at < len(arguments) and len(arguments) + len(keywords) >= required:
                        yield from constants(arguments[at])
            case ast.Assign(targets=targets, value=value):
                if any(isinstance(target, ast.Name) and target.id in NAMES for target in targets):
                    yield from constants(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if name in NAMES:
                yield from constants(value)
            case ast.Tuple(elts=[first, ast.Constant(value=str(severity)), *_]) if severity in SEVERITIES:
                yield from constants(first)
            case ast.FunctionDef(name=name, returns=ast.expr() as returns) if "mechanism" in name:
                if ast.unparse(returns).startswith("str"):
                    for inner in ast.walk(node):
                        if isinstance(inner, ast.Return):
                            yield from constants(inner.value)


@cache
def emitted() -> dict[str, set[str]]:
    """Return every rule and mechanism that the package names, and the files that do."""
    rooms = ("diagnose", "lanes", "scan", "checkpoints", "inputs")
    files = [path for room in rooms for path in sorted((PACKAGE / room).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text("utf-8")) for path in [*files, *(PACKAGE / "pipeline").glob("*.py")]}
    places = places_of(list(trees.values()))
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in emitted_by(tree, places):
            found.setdefault(name, set()).add(str(path.relative_to(PACKAGE.parent)))
    return found
