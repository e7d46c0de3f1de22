"""Imports point one way: a room may import only from rows above its own, and the torch-free rooms never reach torch.

Every import in ``nanprobe/`` is parsed, also those inside functions. The rows are those of ``docs/architecture.md``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "nanprobe"

ROWS: dict[str, int] = {
    "errors": 0,
    "records": 0,
    "scan_records": 0,
    "formats": 0,
    "catalogue": 0,
    "nearest": 0,
    "out_of_memory": 0,
    "special_file": 0,
    "progress": 0,
    "exit_codes": 0,
    "version": 0,
    "config": 1,
    "serialize": 1,
    "numerics": 2,
    "checkpoints": 3,
    "inputs": 3,
    "capture": 4,
    "integrations": 4,
    "lanes": 4,
    "diagnose": 5,
    "scan": 5,
    "pipeline": 6,
    "render": 6,
    "report": 7,
    "scanning": 7,
    "api": 7,
    "cli": 7,
    "_console": 7,
    "__main__": 7,
}
"""Room to row. The side rooms stand at row 4: they build on the inputs, and only the interface builds on them."""

INTERFACE = "__init__"
"""The Python interface: it may import anything, but nothing heavy while it is itself imported."""

SAME_ROW = {
    ("inputs", "checkpoints"),
    ("exit_codes", "records"),
    ("exit_codes", "scan_records"),
    ("scan_records", "records"),
    ("api", "report"),
    ("scanning", "report"),
    ("__main__", "cli"),
    ("cli", "_console"),
    ("cli", "scanning"),
    ("__main__", "_console"),
    ("integrations", "capture"),
}
"""Rooms of one row that may still see each other, the first importing the second."""

FORBIDDEN = {("diagnose", "lanes"), ("lanes", "capture"), ("lanes", "integrations"), ("diagnose", "capture")}
"""Allowed by row, but not wanted: diagnosis works on records, and a replay does not know who captures."""

RECORDS = {"nanprobe.lanes.trace", "nanprobe.lanes.stored", "nanprobe.lanes.step_facts"}
"""Files that hold the records a room hands on; they may be imported where the rest of the room is not wanted."""

TORCH_FREE = {
    "errors", "records", "scan_records", "formats", "catalogue", "nearest", "out_of_memory", "progress", "exit_codes",
    "special_file", "version", "config", "serialize", "scan", "render", "report", "scanning", "cli", "_console",
    "__main__", INTERFACE,
}  # fmt: skip
"""Rooms that name no torch anywhere in their own files, and reach none while they are imported."""

TORCH_FREE_FILES = {
    f"nanprobe.numerics.{name}" for name in ("crc", "native", "stored", "stored_kernels", "stored_tables")
}
"""Files that need no torch in a room that otherwise does, for the rooms that work without it."""

LAZY_TORCH = {"checkpoints"}
"""Rooms that may import torch inside functions only."""

LAZY_DOOR = {"cli", INTERFACE}
"""Rooms whose function bodies may import rooms that need torch: the commands and the Python interface."""

HEAVY = {"torch", "transformers"}


@dataclass(frozen=True)
class Import:
    """One import statement: in which file, of what, at which line, and whether it runs at import time."""

    room: str
    file: str
    line: int
    target: str
    at_import: bool

    @property
    def target_room(self) -> str | None:
        """The room of nanprobe that is imported, None for other packages."""
        parts = self.target.split(".")
        if parts[0] != "nanprobe":
            return None
        return parts[1] if len(parts) > 1 else INTERFACE

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.room} imports {self.target}"


def room_of(path: Path) -> str:
    """Return the room a file of the package belongs to: the folder, or the file's own name at the top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_type_checking(node: ast.If) -> bool:
    """Tell whether an if statement is ``if TYPE_CHECKING:``, whose body never runs."""
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(source: str, path: Path) -> Iterator[Import]:
    """Yield every import of a file, relative ones made absolute; those for types only count as not at import."""
    package = ["nanprobe", *path.relative_to(PACKAGE).parent.parts]

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and is_type_checking(child):
                inside = False
            targets: list[str] = []
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    up = package[: len(package) - child.level + 1]
                    base = ".".join([*up, base]) if base else ".".join(up)
                if base == "nanprobe":
                    targets = [f"nanprobe.{a.name}" if a.name in ROWS else "nanprobe" for a in child.names]
                else:
                    targets = [base]
            for target in targets:
                yield Import(room_of(path), str(path.relative_to(PACKAGE.parent)), child.lineno, target, at_import)
            yield from walk(child, inside)

    yield from walk(ast.parse(source), True)


def all_imports() -> list[Import]:
    """Return every import of every file of the package."""
    return [found for path in sorted(PACKAGE.rglob("*.py")) for found in imports_of(path.read_text("utf-8"), path)]


def direction_errors(imports: list[Import]) -> list[str]:
    """Return what is wrong with the direction of these imports, one line each."""
    wrong = []
    for found in imports:
        target = found.target_room
        if target is None or target == found.room or found.room == INTERFACE:
            continue
        if target == INTERFACE:
            wrong.append(f"{found}: the interface is for users, not for rooms")
        elif found.room not in ROWS or target not in ROWS:
            wrong.append(f"{found}: a room that the table of rows does not know")
        elif (found.room, target) in FORBIDDEN and found.target not in RECORDS:
            wrong.append(f"{found}: not wanted")
        elif ROWS[target] >= ROWS[found.room] and (found.room, target) not in SAME_ROW:
            wrong.append(f"{found}: row {ROWS[found.room]} must not import from row {ROWS[target]}")
    return wrong


def torch_errors(imports: list[Import]) -> list[str]:
    """Return where a torch-free room names torch, or reaches it through what it imports when it is imported."""
    needs_torch = {i.room for i in imports if i.at_import and i.target.split(".")[0] in HEAVY}
    wrong = []
    for found in imports:
        package = found.target.split(".")[0]
        if found.room in TORCH_FREE and package in HEAVY:
            wrong.append(f"{found}: this room promises to work without it")
        if found.room in LAZY_TORCH and package in HEAVY and found.at_import:
            wrong.append(f"{found}: only inside a function")
        target = found.target_room if found.target not in TORCH_FREE_FILES else None
        file = found.file.removesuffix(".py").replace("/", ".")
        if file in TORCH_FREE_FILES and package in HEAVY:
            wrong.append(f"{found}: this file promises to work without it")
        if found.room in TORCH_FREE and target in needs_torch and (found.at_import or found.room not in LAZY_DOOR):
            wrong.append(f"{found}: that room imports torch")
    return wrong


def parse(source: str, file: str) -> list[Import]:
    """Parse made-up source as if it stood in the file ``file`` of the package."""
    return list(imports_of(source, PACKAGE / file))


def test_every_import_points_upwards() -> None:
    assert direction_errors(all_imports()) == []


def test_the_documented_rows_are_these() -> None:
    documented = {}
    for line in (PACKAGE.parent / "docs" / "architecture.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and cells[1].isdigit():
            documented.update(dict.fromkeys(re.findall(r"`(\w+)/?`", cells[2]), int(cells[1])))
    built = {room_of(path) for path in PACKAGE.rglob("*.py")} - {INTERFACE}
    assert {room: documented.get(room) for room in built} == {room: ROWS[room] for room in built}


def test_torch_free_rooms_reach_no_torch() -> None:
    assert torch_errors(all_imports()) == []


def test_every_file_belongs_to_a_known_room() -> None:
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")}
    assert rooms - {INTERFACE} <= set(ROWS)
    assert {"errors", "records"} <= rooms


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("records.py", "from nanprobe.config import Settings"),
        ("config.py", "import nanprobe.pipeline"),
        ("inputs/batch.py", "from nanprobe import cli"),
        ("inputs/batch.py", "from ..lanes.lane import Lane"),
        ("inputs/batch.py", "def f():\n    from nanprobe.lanes import lane"),
        ("diagnose/origin.py", "from nanprobe.lanes.lane import Lane"),
        ("render/table.py", "from nanprobe import pipeline"),
        ("config.py", "from nanprobe import replay_something"),
        ("records.py", "from nanprobe.unknown_room import x"),
    ],
)
def test_a_wrong_direction_is_found(file: str, source: str) -> None:
    assert len(direction_errors(parse(source, file))) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("pipeline.py", "from nanprobe.lanes.lane import Lane\nimport torch"),
        ("inputs/batch.py", "from .call import bind\nfrom ..errors import UsageError"),
        ("diagnose/origin.py", "from nanprobe.lanes.trace import Trace"),
        ("cli.py", "def command():\n    from nanprobe import pipeline"),
        ("__init__.py", "def __getattr__(name):\n    from nanprobe import pipeline"),
    ],
)
def test_a_right_direction_passes(file: str, source: str) -> None:
    assert direction_errors(parse(source, file)) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("config.py", "def f():\n    import torch"),
        ("render/table.py", "import torch.nn as nn"),
        ("checkpoints/index.py", "from torch import Tensor"),
    ],
)
def test_torch_in_a_torch_free_room_is_found(file: str, source: str) -> None:
    assert len(torch_errors(parse(source, file))) == 1


def test_torch_behind_another_room_is_found() -> None:
    pipeline = parse("import torch", "pipeline.py")
    assert len(torch_errors([*pipeline, *parse("from nanprobe import pipeline", "cli.py")])) == 1
    assert torch_errors([*pipeline, *parse("def f():\n    from nanprobe import pipeline", "cli.py")]) == []
    assert torch_errors([*parse("def f():\n    import torch", "checkpoints/index.py")]) == []
