"""A deployment that changes its context's text: records that saw the old one are misses, in every tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import EngineFactory
from .engines import FIRST_WORD, Answer, same
from .test_store import RECORDED, ask, computed, empty_pool, stored

WORDS = tuple(f"w{FIRST_WORD + 7 * i % 400}" for i in range(90))


@pytest.mark.slow
def test_records_behind_another_text_are_misses(
    start_engine: EngineFactory, attention_model: Path, tmp_path: Path
) -> None:
    """One path, whose content changes between three starts of one disk tier."""
    text = tmp_path / "context.txt"

    def served(words: tuple[str, ...], disk: str = "disk") -> tuple[Answer, int]:
        text.write_text(" ".join(words))
        tier = {"type": "disk", "path": str(tmp_path / disk), "bytes": 64 << 20}
        options = {"context": "text", "context_file": str(text), **stored(tier)}
        with start_engine(attention_model, options=options) as engine:
            (answer,) = engine.ask(ask())
            engine.call(empty_pool)
            return answer, engine.call(computed)

    old, made = served(WORDS)
    again, loaded = served(WORDS)
    assert same(old, again) and again.cached == RECORDED and loaded == 0
    new, anew = served(WORDS[::-1])
    assert new.cached < RECORDED and anew >= made - 1, "what saw the old text was not read"
    without, _ = served(WORDS[::-1], "another")
    assert same(new, without) and not same(new, old)
