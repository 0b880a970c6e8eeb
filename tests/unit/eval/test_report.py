"""Scores become cells, tables and the plot; and how many prompts the pool takes at once."""

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.answers.methods import DEFAULT, PREFIX, PREFIX_SAME, is_noise, link_method, noise_name
from benchmarks.answers.pareto import Panel, panels, plot
from benchmarks.answers.results import Cell, FamilyResult, TextResult, cell, overall, text_cell
from benchmarks.answers.tables import family_table, notes, overall_table, text_table
from benchmarks.lib.stats import Spread
from vllm_hypic.eval.fitting import PoolError, pool_batches
from vllm_hypic.eval.methods import FULL
from vllm_hypic.eval.runner import MethodAnswer
from vllm_hypic.eval.scores import Likelihood, Metric, Scores
from vllm_hypic.eval.task import Example, Prompt, Task
from vllm_hypic.primitives.plan import PoolLimits
from vllm_hypic.primitives.policies import LinkError

NOISE = noise_name(256)
TIMES = {FULL.name: 0.1, PREFIX.name: 0.08, "hypic-8": 0.02, "hypic-0": 0.01, "naive-8": 0.02}


def scored(marks: Sequence[int], *, kl: float = 0.0) -> list[Scores]:
    """``marks``: right or wrong; a wrong answer leaves full recompute's at token 2."""
    return [Scores(bool(m), bool(m), float(m), float(m), None if m else 2, kl, bool(m)) for m in marks]


def outcomes(n: int, cached: int = 60) -> list[MethodAnswer]:
    return [MethodAnswer("", (), {}, 100, cached)] * n


def family(name: str, marks: dict[str, Sequence[int]], *, left_out: int = 0) -> FamilyResult:
    full = scored(marks[FULL.name])
    times = {method: Spread.of([s]) for method, s in TIMES.items()}
    cells = (cell(m, outcomes(len(own)), scored(own), full, times.get(m)) for m, own in marks.items())
    return FamilyResult(name, len(full), left_out, tuple(cells))


MARKS = {
    "one": {FULL.name: [1, 1, 1, 1], NOISE: [1, 1, 1, 1], "hypic-8": [1, 1, 1, 1], "hypic-0": [1, 1, 1, 0]},
    "two": {FULL.name: [1, 0], NOISE: [1, 0], "hypic-8": [1, 0], "hypic-0": [0, 0]},
}
RESULTS = [family(name, marks) for name, marks in MARKS.items()]
SCORES = {name: {m: scored(marks) for m, marks in methods.items()} for name, methods in MARKS.items()}


def text(table: Table) -> str:
    console = Console(width=150)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_cells() -> None:
    own, full = scored([1, 1, 0, 0], kl=0.5), scored([1, 1, 1, 0])
    found = cell("naive-8", [*outcomes(3), *outcomes(1, cached=0)], own, full)
    assert (found.exact.mean.value, found.exact.difference.value) == (50.0, -25.0)
    assert found.exact.difference.low < -25 < found.exact.difference.high <= 0
    assert found.f1.mean.value == found.rouge_l.mean.value == 50.0
    assert (found.same_tokens.value, found.same_argmax.value, found.first_divergence) == (50.0, 50.0, 2)
    assert (found.kl_median, found.kl_mean.value, found.kl_worst) == (0.5, 0.5, 0.5)
    assert (found.prompt_tokens, found.computed_tokens, found.reused_none) == (100, 55, 1)
    assert found.computed_share == 0.55
    assert found.first_token is None
    found = cell("x", outcomes(3), scored([1, 1, 1]), scored([1, 1, 1]))
    assert found.first_divergence is None
    assert found.exact.difference.value == found.exact.difference.low == found.exact.difference.high == 0
    one = Scores(True, False, 0.5, 0.25, None, 0.0, True)
    assert [m.of(one) for m in Metric] == [1.0, 0.0, 0.5, 0.25]
    found = cell("x", outcomes(1), [one], [one])
    assert [found.score(m).mean.value for m in Metric] == [100.0, 0.0, 50.0, 25.0]


def test_over_all_families() -> None:
    full, noise, wide, narrow = overall(RESULTS, SCORES, Metric.EXACT)
    assert [o.method for o in (full, noise, wide, narrow)] == [FULL.name, NOISE, "hypic-8", "hypic-0"]
    assert full.mean.value == 75.0  # families count alike: 100 % and 50 %
    assert narrow.difference.value == pytest.approx(-37.5)  # 25 and 50 points
    assert (narrow.worst_family, narrow.worst.value) == ("two", -50.0)
    assert wide.difference.value == 0
    assert wide.first_token_speedup == pytest.approx(5)
    assert noise.first_token_speedup is None
    assert narrow.same_tokens == pytest.approx(37.5)  # 3 of 4 and none
    assert narrow.kl == 0


def test_tables() -> None:
    rows = {line.split("  ")[1]: line for line in text(family_table(RESULTS[1])).splitlines() if "  " in line}
    assert "50.0 [9.5, 90.5]" in rows[FULL.name]
    assert "-50.0 [-100.0, +0.0]" in rows["hypic-0"]
    assert "10.0 ms" in rows["hypic-0"]
    assert rows[NOISE].split()[5:10] == ["50.0", "[9.5,", "90.5]", "0", "50.0"]  # nothing differs
    found = text(overall_table(overall(RESULTS, SCORES, Metric.EXACT), 2, Metric.EXACT))
    assert "mean over 2 families" in found
    [narrow] = [line for line in found.splitlines() if "hypic-0" in line]
    assert "-37.5" in narrow and "two" in narrow and "40.0 %" in narrow and "full / 10.0" in narrow


def test_texts_that_go_on() -> None:
    full = [Likelihood(2.0, 0.0, True), Likelihood(3.0, 0.0, True)]
    other = [Likelihood(2.2, 0.1, True), Likelihood(3.3, 0.2, False)]
    found = text_cell("block", outcomes(2), other, full)
    assert found.nll.value == pytest.approx(2.75)
    assert found.increase.value == pytest.approx(10.0)
    assert found.increase.low <= 10 <= found.increase.high
    assert found.kl_median == pytest.approx(0.15) and found.computed_share == 0.4
    cells = (text_cell(FULL.name, outcomes(2), full, full), found)
    table = text(text_table(TextResult("mixed", 2, 0, cells)))
    [row] = [line for line in table.splitlines() if "block" in line]
    assert "2.750" in row and "+10.0 [" in row
    [note] = notes(TextResult("mixed", 2, 1, cells))
    assert note == "mixed: 1 prompts do not fit the context and were left out."


def test_notes() -> None:
    assert notes(RESULTS[0]) == []
    [note] = notes(family("one", MARKS["one"], left_out=3))
    assert note == "one: 3 prompts do not fit the context and were left out."
    of_one = outcomes(4, cached=0), SCORES["one"]["hypic-8"], SCORES["one"][FULL.name]
    [note] = notes(FamilyResult("one", 4, 0, tuple(cell(name, *of_one) for name in (FULL.name, "hypic-32"))))
    [hopeless] = notes(family("one", {FULL.name: [0, 0]}))
    assert "reuse can lose none" in hopeless
    assert note.startswith("one: hypic-32 reused nothing in 4 of 4 prompts")


def test_panels() -> None:
    one, two, mean = panels(RESULTS, overall(RESULTS, SCORES, Metric.EXACT), Metric.EXACT)
    assert [p.method for p in one.points] == [FULL.name, "hypic-8", "hypic-0"]
    assert one.noise is not None and one.noise.value == 0
    assert "100.0 %" in one.title and "50.0 %" in two.title
    assert [(p.x, p.y.value) for p in two.points] == [(100, 0), (20, 0), (10, -50)]
    assert [p.x for p in mean.points] == pytest.approx([100, 20, 10])
    assert [(p.line, p.width) for p in one.points] == [(FULL.name, 0), ("hypic", 8), ("hypic", 0)]
    # Without times the plot shows what is computed.
    cells = tuple(Cell(**{**vars(c), "first_token": None}) for c in RESULTS[0].cells if c.method != NOISE)
    [panel] = panels([FamilyResult("one", 4, 0, cells)], [], Metric.F1)
    assert panel.x_label.startswith("computed")
    assert {p.x for p in panel.points} == {40.0}
    assert panel.noise is None


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_plot_is_a_png(tmp_path: Path, n: int) -> None:
    pytest.importorskip("matplotlib")
    drawn = (panels(RESULTS, overall(RESULTS, SCORES, Metric.EXACT), Metric.EXACT) * 2)[:n]
    assert all(isinstance(p, Panel) for p in drawn)
    plot(tmp_path / "x.png", drawn, title="title")
    data = (tmp_path / "x.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (720 * min(n, 3), 552 * (1 if n <= 3 else 2))


def test_names_and_sure_reuse_of_methods() -> None:
    assert [link_method(name).name for name in DEFAULT] == [
        *(m.name for m in (FULL, PREFIX, PREFIX_SAME)),
        *DEFAULT[3:],
    ]
    assert is_noise(NOISE) and not any(is_noise(link_method(name).name) for name in DEFAULT)
    found = link_method("hypic-8/text/query-10@cdc")
    assert (found.seam, found.context, found.islands, found.mode) == (8, "text", "query-10", "cdc")
    with pytest.raises(LinkError, match="'hypic-8@tags': expected one of off, structure, text, cdc after"):
        link_method("hypic-8@tags")
    # Tokens that are certain to be reused.
    prompt = Prompt((1,) * 40, ((1,) * 200, (1,) * 100, (1,) * 40), (1,) * 5)
    assert FULL.reusable(prompt, 32) == 0
    assert link_method("hypic-8").reusable(prompt, 32) == 40 + 184 + 84
    assert [link_method(name).reusable(prompt, 41) for name in ("hypic-8", "epic-16")] == [184 + 84] * 2
    assert link_method("hypic-8/text/query-10").reusable(prompt, 32) == 40 + 268 - 26


def example(documents: int, tokens: int) -> Example:
    task = Task("big", "s", ("d",) * documents, "q", ("a",), 4)
    return Example(task, Prompt((1,) * 10, ((1,) * tokens,) * documents, (1,) * 5))


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        (None, [4, 3]),  # a stock engine
        (PoolLimits(10**6, 10**6, 64, 10**6, 10**6, 12), [4, 3]),
        # An example takes 1 + 3 * 2 pages, 4 slots, 3 * 12 tiles.
        (PoolLimits(21, 10**6, 64, 10**6, 10**6, 12), [3, 3, 1]),
        (PoolLimits(20, 10**6, 64, 10**6, 10**6, 12), [2, 2, 2, 1]),
        (PoolLimits(10**6, 8, 64, 10**6, 10**6, 12), [2, 2, 2, 1]),
        (PoolLimits(10**6, 10**6, 64, 10**6, 71, 12), [1] * 7),
    ],
)
def test_prompts_that_fit_the_pool_together(limits: PoolLimits | None, sizes: list[int]) -> None:
    found = list(pool_batches([example(3, 100)] * 7, limits, 4))
    assert [len(part) for part in found] == sizes
    assert [i for part in found for i in part] == list(range(7))


def test_a_prompt_that_does_not_fit_the_pool_is_refused() -> None:
    with pytest.raises(PoolError, match=r"family 'big', 315 tokens in 3 segments.*raise --kv-gib"):
        list(pool_batches([example(1, 10), example(3, 100)], PoolLimits(6, 99, 64, 999, 999, 12), 4))
