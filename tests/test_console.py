"""The progress bar: only on a terminal and after a while, gone at the end; and text made safe for one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nanprobe._console import bar
from nanprobe._console.bar import ConsoleProgress
from nanprobe._console.terminal import one_line


class Timer:
    """A timer that a test lets run out."""

    made: list[Timer]

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        assert seconds == bar.PATIENCE
        self.run_out = function
        self.daemon = False
        self.state = "waiting"
        Timer.made.append(self)

    def start(self) -> None:
        assert self.daemon
        self.state = "running"

    def cancel(self) -> None:
        self.state = "cancelled"


@pytest.fixture(autouse=True)
def timers(monkeypatch: pytest.MonkeyPatch) -> list[Timer]:
    Timer.made = []
    monkeypatch.setattr(bar.threading, "Timer", Timer)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Timer.made


def test_a_long_run_on_a_terminal_shows_a_bar_on_stderr(
    timers: list[Timer], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = ConsoleProgress(show=True, quiet=False)
    progress.stage("replay", total=4)
    progress.step(3, detail="encoder.layer.3")
    assert capsys.readouterr().err == ""
    (timer,) = timers
    timer.run_out()
    progress.note("a [bold]note[/bold]")
    progress.stage("trace")
    progress.step(detail="head")
    progress.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "replay" in err
    assert "3/4" in err
    assert "nanprobe: note: a [bold]note[/bold]" in err
    assert timer.state == "cancelled"


def test_a_short_run_shows_none(timers: list[Timer], capsys: pytest.CaptureFixture[str]) -> None:
    progress = ConsoleProgress(show=True, quiet=False)
    progress.stage("replay", total=1)
    progress.step()
    progress.close()
    assert timers[0].state == "cancelled"
    timers[0].run_out()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("show", "quiet"), [(False, False), (True, True)])
def test_nobody_watches(timers: list[Timer], capsys: pytest.CaptureFixture[str], show: bool, quiet: bool) -> None:
    progress = ConsoleProgress(show=show, quiet=quiet)
    progress.stage("replay", total=1)
    progress.step()
    progress.note("something")
    progress.close()
    assert timers == []
    assert capsys.readouterr() == ("", "" if quiet else "nanprobe: note: something\n")


def test_one_line_shows_control_characters() -> None:
    assert one_line("a\nb\tc \x1b[1m\x07 é \u202e") == r"a b c \x1b[1m\x07 é \u202e"
