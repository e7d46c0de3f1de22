"""What the README shows is what the program prints, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

from nanprobe.cli import main
from tests.samples import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_demo_is_shown_as_it_is_printed() -> None:
    shown = re.search(r"<!-- demo -->\n```\n(.*?)```\n<!-- /demo -->", README, re.DOTALL)
    assert shown is not None
    printed = (ROOT / "sample_runs/feed-forward-overflow/expected.txt").read_text(encoding="utf-8")
    report = printed.split("\n", 1)[1]
    assert shown.group(1) == report.partition("\n\nGradients\n")[0] + "\n"
    assert ">>" in shown.group(1)


def test_the_operation_that_is_explained_is_one_that_is_shown() -> None:
    demo, _, rest = README.partition("<!-- /demo -->")
    explained = re.search(r"exactly: here `([\w.]+)`", rest)
    assert explained is not None
    assert explained.group(1) in demo


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_every_make_target_exists() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for named in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert named in targets


def test_commands_that_are_not_built_say_so(capsys: object) -> None:
    unbuilt = README.split("## What it does not do yet")[1].split("##")[0]
    for name in re.findall(r"`([a-z]+(?:-[a-z]+)?)`", unbuilt):
        if name not in ("autocast",):
            assert main([name, "x"]) == 2, name


def test_folders_of_the_readme_exist() -> None:
    for name in ("configs", "sample_runs", "docs", "benchmarks"):
        assert (Path(ROOT) / name).is_dir()
