"""``nanprobe explain``: what it prints in each format, and what it says to a name that is none."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from nanprobe.catalogue import ENTRIES, FAMILIES
from nanprobe.cli import main
from nanprobe.errors import UsageError
from nanprobe.render import FORMATS
from nanprobe.render.explained import explained

PAGE = Path(__file__).resolve().parents[2] / "docs" / "catalogue.md"


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def test_the_page_is_the_catalogue() -> None:
    assert PAGE.read_text("utf-8") == explained(None, "markdown", verbose=True), "it is stale: run `make catalogue`"


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    words = " ".join(out.split())
    for family in FAMILIES:
        assert family.title in out
    for entry in ENTRIES.values():
        assert f"\n  {entry.name} " in out
        assert f"{entry.name} {entry.meaning}" in words


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_says_all_of_it(name: str) -> None:
    words = " ".join(explained(name, width=80).split())
    entry = ENTRIES[name]
    assert words.startswith(f"{name} ({entry.kind}): {entry.meaning} What it means {entry.what} Why it happens")
    for text in (entry.why, entry.looks_like, *entry.what_to_try, *entry.what_not_to_try, *entry.related):
        assert text in words
    for reference in entry.references:
        assert f"{reference.issue}: {reference.says}" in words


def test_the_command_prints_the_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "masked-row"]) == 0
    assert capsys.readouterr() == (explained("masked-row", width=80), "")


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("name", [None, *ENTRIES])
def test_lines_fit_and_are_filled(name: str | None, width: int) -> None:
    lines = explained(name, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line != line.rstrip()] == []
    # A paragraph whose lines end early would mean that something in it cannot be broken.
    wrapped = [(line, after) for line, after in itertools.pairwise(lines) if line and after.startswith("    ")]
    assert all(len(line) + 1 + len(after.split()[0]) > width for line, after in wrapped)


def test_a_narrow_terminal_still_gets_every_word() -> None:
    assert explained(None, width=30).split() == explained(None, width=80).split()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("overfow", "did you mean `overflow`?"),
        ("Masked_Row", "did you mean `masked-row`?"),
        ("masked row", "did you mean `masked-row`?"),
        ("nan-weight", "did you mean `nonfinite-weight`?"),
        ("scale", "names like it are `loss-scale-overflow`, `loss-scale-collapsed`"),
        ("xyzzy", "`nanprobe explain` lists them all"),
        ("", "`nanprobe explain` lists them all"),
        ("a\x1b[31m\nb", r"'a\x1b[31m b'"),
    ],
)
def test_a_wrong_name(capsys: pytest.CaptureFixture[str], name: str, hint: str) -> None:
    assert main(["explain", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert hint in err
    assert len(err.splitlines()) == 1
    assert main(["explain", name, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["exit_code"]) == ("explain", 2)
    assert hint in document["error"]


def test_json_holds_the_entry_or_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "masked-row", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (entry,) = document["entries"]
    assert (document["schema_version"], document["command"], document["exit_code"]) == (1, "explain", 0)
    assert entry["name"] == "masked-row"
    assert entry["family"] == "Operations that have no result"
    assert entry["what_not_to_try"] == list(ENTRIES["masked-row"].what_not_to_try)
    assert entry["references"][0] == {
        "issue": "pytorch/pytorch#41508",
        "url": "https://github.com/pytorch/pytorch/issues/41508",
        "says": ENTRIES["masked-row"].references[0].says,
    }
    assert main(["explain", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in document["entries"]] == list(ENTRIES)


def test_markdown() -> None:
    one = explained("overflow", "markdown")
    assert one.startswith("# overflow\n\n*Mechanism*: the exact result")
    assert "\n**What not to try**\n\n- Lowering the learning rate" in one
    assert "[pytorch/pytorch#119131](https://github.com/pytorch/pytorch/issues/119131)" in one
    listed = explained(None, "markdown")
    assert "- `overflow`: the exact result" in listed
    assert "What to try" not in listed
    whole = explained(None, "markdown", verbose=True)
    assert all(f"\n### {name}\n" in whole and f"](#{name})" in whole for name in ENTRIES)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_of_reports_ends_in_one_line_break(format: str) -> None:
    for text in (explained("overflow", format), explained(None, format), explained(None, format, verbose=True)):
        assert text.endswith("\n")
        assert not text.endswith("\n\n")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UsageError, match="`json`"):
        explained(None, "jsn")
    assert main(["explain", "--format", "html"]) == 2


def test_files_and_colour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "overflow", "-o", "a.md", "-o", "b.json", "-o", "c.txt"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["nanprobe: wrote a.md", "nanprobe: wrote b.json", "nanprobe: wrote c.txt"]
    assert Path("a.md").read_text() == explained("overflow", "markdown")
    assert json.loads(Path("b.json").read_text())["entries"][0]["name"] == "overflow"
    assert main(["explain", "nothing-like-it", "-o", "d.md"]) == 2
    assert not (tmp_path / "d.md").exists()
    capsys.readouterr()
    main(["explain", "overflow", "--color", "always"])
    colored = capsys.readouterr().out
    assert "\x1b[1mWhat to try\x1b[0m" in colored
    main(["explain", "overflow"])
    assert "\x1b" not in capsys.readouterr().out
