"""From a config file to a :class:`~nanprobe.config.specs.Config`: every key, its type, and where it stood.

A message names file, line, key, what was expected and what was found; an unknown key also names the legal key nearest
to it. Relative paths are relative to the config file's folder. A key without a value counts as not given.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nanprobe.config import checks
from nanprobe.config.checks import Check, Unfit
from nanprobe.config.document import Node, read_document
from nanprobe.config.specs import (
    FORMAT_NAMES,
    SETTING_CHECKS,
    BatchSpec,
    CheckpointSpec,
    Config,
    IgnoreRule,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    Settings,
    Tolerance,
    TransformersSpec,
    mechanism_pattern,
)
from nanprobe.errors import UsageError
from nanprobe.nearest import suggestion

__all__ = ["CONFIG_NAMES", "find_config", "load_config"]

CONFIG_NAMES = ("nanprobe.yaml", "nanprobe.yml")
"""File names looked for in the current folder, in this order."""

_TOP = (
    "model", "checkpoint", "batch", "loss", "mode", "autocast_policy", "attention", "fp8_scaling", "tf32",
    "reduced_precision_reduction", "flush_subnormals", "train", "backward", "loss_scale", "keep_fp32",
    "clip_grad_norm", "optimizer", "seed", "ignore", "tolerances", "device",
)  # fmt: skip


def find_config(folder: Path) -> Path:
    """Return the config file of a folder: nanprobe.yaml, else nanprobe.yml; UsageError when there is neither."""
    there = [folder / name for name in CONFIG_NAMES if os.path.lexists(folder / name)]
    if there:
        # A folder or a broken link of that name is reported for what it is when it is read.
        return next((path for path in there if path.is_file()), there[0])
    where = "the current folder" if folder == Path() else str(folder)
    raise UsageError(f"no {' or '.join(CONFIG_NAMES)} in {where}; name a config file with --config FILE")


def load_config(source: Path) -> Config:
    """Read a config file; UsageError naming file, line and key when something in it cannot be used."""
    root = read_document(source)
    return _Reader(source).config(root)


@dataclass(frozen=True, slots=True)
class _Section:
    """One mapping of the document that is being taken apart: its name in messages, its line, its nodes."""

    name: str
    line: int
    nodes: Mapping[str, Node]

    def label(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


class _Reader:
    """Reads one document; keeps its path for messages and collects notes."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.folder = source.parent
        self.notes: list[str] = []

    def fail(self, line: int, text: str) -> NoReturn:
        raise UsageError(f"{self.source}:{line}: {text}")

    def section(self, node: Node, name: str, legal: tuple[str, ...]) -> _Section:
        """Return a node as a mapping with none but the legal keys; keys without a value are left out."""
        if not isinstance(node.value, dict):
            where = f"`{name}`: " if name else ""
            got = checks.describe(node.value)
            self.fail(node.line, f"{where}expected a mapping with the keys {', '.join(legal)}; got {got}")
        for key, child in node.value.items():
            if key not in legal:
                inside = f" in `{name}`" if name else ""
                self.fail(child.line, f"unknown key `{key}`{inside}; {suggestion(key, legal, limit=len(legal))}")
        given = {key: child for key, child in node.value.items() if child.value is not None}
        return _Section(name, node.line, given)

    def take(self, section: _Section, key: str, check: Check, default: Any = None) -> Any:
        """Return the checked value of a key, ``default`` when it is not given."""
        node = section.nodes.get(key)
        return default if node is None else self.checked(node, section.label(key), check)

    def need(self, section: _Section, key: str, check: Check) -> Any:
        """Return the checked value of a key that must be there."""
        if key not in section.nodes:
            self.fail(section.line, f"`{section.name}` needs the key `{key}`")
        return self.take(section, key, check)

    def checked(self, node: Node, label: str, check: Check) -> Any:
        """Return what the check makes of a node; UsageError with line and key when it refuses."""
        try:
            return check(node.data())
        except Unfit as error:
            self.fail(node.line, f"`{label}`: {error}")

    def kwargs(self, section: _Section) -> dict[str, Any]:
        """Return the keyword arguments of a factory; a note says when an unquoted yes or no was kept as text."""
        values: dict[str, Any] = self.take(section, "kwargs", checks.keyword_arguments, {})
        if values:
            for label, node in _scalars(section.nodes["kwargs"], section.label("kwargs")):
                if node.plain and isinstance(node.value, str) and node.value.lower() in ("yes", "no", "on", "off"):
                    boolean = str(checks.boolean(node.value)).lower()
                    self.notes.append(
                        f"{self.source}:{node.line}: `{label}: {node.value}` is passed as text; "
                        f"write {boolean} for a boolean, or quotes to make the text plain"
                    )
        return values

    def path(self, section: _Section, key: str) -> tuple[Path, str]:
        """Return a path that must be given, relative to the config file, and as it was written."""
        given: str = self.need(section, key, checks.text)
        return self.folder / given, given

    def config(self, root: Node) -> Config:
        """Return the whole config."""
        top = self.section(root, "", _TOP)
        if "model" not in top.nodes:
            self.fail(root.line, "there is no `model`; say how to build it with `model: {factory: file.py:callable}`")
        batch = self.batch(top.nodes["batch"]) if "batch" in top.nodes else None
        settings: dict[str, Any] = {
            key: self.take(top, key, check) for key, check in SETTING_CHECKS.items() if key in top.nodes
        }
        if batch is not None:
            settings["batch_dim"] = batch.dim
        model = self.model(top.nodes["model"])
        return Config(
            source=self.source,
            folder=self.folder,
            model=model,
            checkpoint=self.checkpoint(top.nodes["checkpoint"]) if "checkpoint" in top.nodes else None,
            batch=batch,
            loss=self.loss(top.nodes["loss"]) if "loss" in top.nodes else None,
            settings=Settings(
                **settings,
                optimizer=self.optimizer(top.nodes["optimizer"]) if "optimizer" in top.nodes else None,
                ignore=self.ignore(top.nodes["ignore"]) if "ignore" in top.nodes else (),
                tolerances=self.tolerances(top.nodes["tolerances"]) if "tolerances" in top.nodes else (),
            ),
            origins={key: f"{self.source}:{node.line}" for key, node in top.nodes.items()},
            notes=tuple(self.notes),
        )

    def model(self, node: Node) -> ModelSpec:
        """Return the section ``model``."""
        section = self.section(node, "model", ("factory", "kwargs", "transformers"))
        both = [key for key in ("factory", "transformers") if key in section.nodes]
        if len(both) == 2:
            self.fail(section.nodes[both[1]].line, "`model` has both `factory` and `transformers`; keep one")
        if not both:
            self.fail(
                node.line, "`model` needs `factory: file.py:callable`, or `transformers: {path: ..., class: ...}`"
            )
        if both == ["factory"]:
            return ModelSpec(factory=self.need(section, "factory", checks.text), kwargs=self.kwargs(section))
        if "kwargs" in section.nodes:
            line = section.nodes["kwargs"].line
            self.fail(line, "`model.kwargs` belongs to a factory; move it into `model.transformers`")
        inner = self.section(section.nodes["transformers"], "model.transformers", ("path", "class", "kwargs"))
        path, given = self.path(inner, "path")
        class_ = self.need(inner, "class", checks.text)
        return ModelSpec(
            transformers=TransformersSpec(path=path, given=given, class_=class_, kwargs=self.kwargs(inner))
        )

    def checkpoint(self, node: Node) -> CheckpointSpec:
        """Return the section ``checkpoint``, which may be a path alone."""
        section = self._with_path(node, "checkpoint", ("path", "key", "strip_prefix", "strict"))
        path, given = self.path(section, "path")
        return CheckpointSpec(
            path=path,
            given=given,
            key=self.take(section, "key", _key),
            strip_prefix=self.take(section, "strip_prefix", checks.text),
            strict=self.take(section, "strict", checks.boolean, True),
        )

    def batch(self, node: Node) -> BatchSpec:
        """Return the section ``batch``, which may be a path alone."""
        section = self._with_path(node, "batch", ("path", "key", "call", "dim"))
        path, given = self.path(section, "path")
        return BatchSpec(
            path=path,
            given=given,
            key=self.take(section, "key", _key),
            call=self.take(section, "call", checks.one_of(*checks.CALLS), "auto"),
            dim=self.take(section, "dim", checks.any_int, 0),
        )

    def _with_path(self, node: Node, name: str, legal: tuple[str, ...]) -> _Section:
        if isinstance(node.value, dict):
            return self.section(node, name, legal)
        if not isinstance(node.value, str):
            got = checks.describe(node.value)
            self.fail(node.line, f"`{name}`: expected a path, or a mapping with the keys {', '.join(legal)}; got {got}")
        self.checked(node, name, checks.text)
        return _Section(name, node.line, {"path": node})

    def loss(self, node: Node) -> LossSpec:
        """Return the section ``loss``."""
        section = self.section(node, "loss", ("factory", "kwargs"))
        return LossSpec(factory=self.need(section, "factory", checks.text), kwargs=self.kwargs(section))

    def optimizer(self, node: Node) -> OptimizerSpec:
        """Return the section ``optimizer``."""
        section = self.section(node, "optimizer", ("name", "kwargs"))
        return OptimizerSpec(name=self.need(section, "name", checks.text), kwargs=self.kwargs(section))

    def ignore(self, node: Node) -> tuple[IgnoreRule, ...]:
        """Return the list ``ignore``."""
        if not isinstance(node.value, list):
            got = checks.describe(node.value)
            self.fail(node.line, f"`ignore`: expected a list of {{module, mechanism, why}}; got {got}")
        rules = []
        for position, item in enumerate(node.value):
            section = self.section(item, f"ignore[{position}]", ("module", "mechanism", "why"))
            if not {"module", "mechanism"} & set(section.nodes):
                self.fail(
                    item.line,
                    f"`{section.name}` would ignore everything; give a `module` or a `mechanism`, as in "
                    "{module: encoder.*, mechanism: overflow, why: known since the last release}",
                )
            lacking = {
                "mechanism": "`mechanism`, so every finding there is ignored",
                "why": "`why`, so nobody will know the reason",
            }
            for key, text in lacking.items():
                if key not in section.nodes:
                    self.notes.append(f"{self.source}:{item.line}: `{section.name}` has no {text}")
            rule = IgnoreRule(
                module=self.take(section, "module", _any_text, "*"),
                mechanism=self.take(section, "mechanism", mechanism_pattern, "*"),
                why=self.take(section, "why", _any_text, ""),
            )
            rules.append(rule)
        return tuple(rules)

    def tolerances(self, node: Node) -> tuple[Tolerance, ...]:
        """Return the mapping ``tolerances``: by format, or by module pattern and format."""
        if not isinstance(node.value, dict):
            got = checks.describe(node.value)
            self.fail(node.line, f"`tolerances`: expected a mapping as {{bf16: 64}}; got {got}")
        found = []
        for name, child in node.value.items():
            if isinstance(child.value, dict):
                inner = self.section(child, f"tolerances.{name}", FORMAT_NAMES)
                for fmt in inner.nodes:
                    multiple = self.take(inner, fmt, checks.positive_number)
                    found.append(Tolerance(module=name, format=fmt, multiple=multiple))
            elif name in FORMAT_NAMES:
                multiple = self.checked(child, f"tolerances.{name}", checks.positive_number)
                found.append(Tolerance(format=name, multiple=multiple))
            else:
                hint = suggestion(name, FORMAT_NAMES)
                self.fail(
                    child.line,
                    f"`tolerances.{name}`: no such format; {hint} A module pattern takes a mapping as {{bf16: 64}}",
                )
        return tuple(found)


def _key(value: Any) -> str:
    """Check for a key into a file: text, or the position in a list."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    return checks.text(value)


def _any_text(value: Any) -> str:
    """Check for text, which may be empty: the root module's path is."""
    if isinstance(value, str):
        return value
    raise Unfit("text", value)


def _scalars(node: Node, label: str) -> Iterator[tuple[str, Node]]:
    """Yield every scalar below a node with its path in the document."""
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            yield from _scalars(child, f"{label}.{key}")
    elif isinstance(node.value, list):
        for position, child in enumerate(node.value):
            yield from _scalars(child, f"{label}[{position}]")
    else:
        yield label, node
