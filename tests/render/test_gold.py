"""Every story reads as its gold files say; ``python -m tests.render.write_gold`` writes them again."""

from __future__ import annotations

import pytest

from tests.render.reports import STORIES
from tests.render.write_gold import GOLD, VIEWS, view


@pytest.mark.parametrize("suffix", VIEWS)
@pytest.mark.parametrize("name", STORIES)
def test_a_story_reads_as_its_gold_file_says(name: str, suffix: str) -> None:
    expected = (GOLD / f"{name}.{suffix}").read_text(encoding="utf-8")
    assert view(STORIES[name](), suffix) == expected


def test_no_gold_file_is_left_over() -> None:
    assert {path.name for path in GOLD.iterdir()} == {f"{name}.{suffix}" for name in STORIES for suffix in VIEWS}
