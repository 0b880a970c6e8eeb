"""Which of several candidates is recommended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_hypic.suggest.candidates import recommended


@pytest.mark.parametrize(
    ("candidates", "right"),
    [
        ([("text", 3, 0.80), ("structure", 2, 0.79), ("off", 1, 0.70)], "structure"),
        ([("text", 3, 0.80), ("structure", 2, 0.77)], "text"),
        ([("cdc, 512", 5, 0.80), ("cdc, 1024", 5, 0.79)], "cdc, 512"),
        ([("text", 3, 0.50), ("prefix caching alone", 0, 0.49)], "prefix caching alone"),
    ],
)
def test_the_simplest_within_two_points_of_the_best(
    candidates: list[tuple[str, int, float]], right: str
) -> None:
    found = [SimpleNamespace(name=n, rank=r, replay=SimpleNamespace(reuse=u)) for n, r, u in candidates]
    assert recommended(found).name == right
