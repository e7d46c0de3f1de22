"""The progress bar: silent for short runs and without a terminal, gone at the end."""

from __future__ import annotations

import time

import pytest

from nanprobe._console import bar
from nanprobe._console.bar import ConsoleProgress
from nanprobe._console.terminal import one_line


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stopped = Clock()
    monkeypatch.setattr(bar.time, "monotonic", stopped.monotonic)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stopped


def work(progress: ConsoleProgress, clock: Clock, seconds: float) -> None:
    progress.stage("replay", total=2)
    clock.now += seconds
    progress.step(detail="encoder.layer.3")
    progress.stage("trace", total=1)
    progress.step()


def test_a_long_run_on_a_terminal_shows_a_bar_on_stderr(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = ConsoleProgress(show=True, quiet=False)
    work(progress, clock, bar.PATIENCE + 1)
    progress.note("a [bold]note[/bold]")
    progress.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "trace" in err
    assert "nanprobe: note: a [bold]note[/bold]" in err


@pytest.mark.parametrize(
    ("show", "quiet", "seconds"),
    [(True, False, bar.PATIENCE / 2), (False, False, 60.0), (True, True, 60.0)],
)
def test_otherwise_there_is_none(
    clock: Clock, capsys: pytest.CaptureFixture[str], show: bool, quiet: bool, seconds: float
) -> None:
    progress = ConsoleProgress(show=show, quiet=quiet)
    work(progress, clock, seconds)
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_nothing_is_drawn_after_the_end(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = ConsoleProgress(show=True, quiet=False)
    progress.close()
    work(progress, clock, 60.0)
    assert capsys.readouterr().err == ""


def test_the_clock_is_the_real_one_elsewhere() -> None:
    assert bar.time is time


def test_one_line_shows_control_characters() -> None:
    assert one_line("a\nb\tc \x1b[1m\x07 é \u202e") == r"a b c \x1b[1m\x07 é \u202e"
