"""Write the gold files again after a change of wording: ``python -m tests.render.write_gold``; then read the diff."""

from __future__ import annotations

from pathlib import Path

from nanprobe.records import ReplayReport
from nanprobe.render import render
from tests.render.reports import STORIES

GOLD = Path(__file__).parent / "gold"

VIEWS = {
    "80.txt": lambda report: render(report, "table", width=80),
    "140.txt": lambda report: render(report, "table", width=140),
    "md": lambda report: render(report, "markdown"),
}


def view(report: ReplayReport, suffix: str) -> str:
    """One story's text in one view."""
    return VIEWS[suffix](report)


def main() -> None:
    """Write every gold file and remove those that no story makes."""
    GOLD.mkdir(exist_ok=True)
    wanted = set()
    for name, story in STORIES.items():
        for suffix in VIEWS:
            path = GOLD / f"{name}.{suffix}"
            path.write_text(view(story(), suffix), encoding="utf-8")
            wanted.add(path)
    for path in set(GOLD.iterdir()) - wanted:
        path.unlink()


if __name__ == "__main__":
    main()
