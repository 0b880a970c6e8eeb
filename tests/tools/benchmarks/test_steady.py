"""``benchmarks steady``: orders that never came before, parts of a run, and a short run."""

from pathlib import Path

import click
import pytest
from commands import measured

from benchmarks.steady import PARTS, Part, SteadyRun, new_orders
from benchmarks.trace import TraceSettings, generate
from vllm_hypic.harness.engine_calls import Answer


def test_no_order_comes_twice() -> None:
    drawn = generate(TraceSettings(requests=60, documents=4, per_request=(2, 3), zipf=2.0))
    orders = [request.documents for request in drawn.requests]
    assert len(set(orders)) < 40 <= len(orders)
    found = [request.documents for request in new_orders(drawn, 12).requests]
    assert found == list(dict.fromkeys(orders))[:12]
    with pytest.raises(click.UsageError, match="60 are asked for: more documents"):
        new_orders(drawn, 60)


def test_a_part_counts_tokens_and_orders_times() -> None:
    answers = [Answer((1,), (s,), {}, tokens, cached) for s, tokens, cached in ((3.0, 10, 0), (1.0, 30, 20))]
    assert Part.of(answers, 2**21) == Part(reuse=0.5, first_token_s=1.0, p99_s=3.0, memory_mib=2.0)


@pytest.mark.parametrize(("reuse", "steadiness"), [((0.2, 0.8, 0.6), 0.75), ((0.0, 0.0), 1.0)])
def test_steadiness_is_that_of_the_last_part(reuse: tuple[float, ...], steadiness: float) -> None:
    run = SteadyRun(1.0, "hypic", 0, tuple(Part(r, 0.0, 0.0, 0.0) for r in reuse))
    assert run.steadiness == pytest.approx(steadiness)


@pytest.mark.slow
@pytest.mark.engine
def test_a_short_run(tmp_path: Path) -> None:
    options = ("--size", "tiny", "--documents", 12, "--zipf", 0.5, "--median-tokens", 128, "--requests", 30)
    _, report = measured(
        tmp_path,
        *("steady", *options, "--shares", "2", "--disk-gib", 0.25, "--per-request", 3, 4, "--eager"),
        *("--threads", 1, "--stock", "{}", "--stock", '{"prefix_match_unit": 16}'),
    )
    ours, *stock = report["results"]["runs"]
    assert [run["engine"] for run in (ours, *stock)] == ["hypic", "stock", "stock prefix_match_unit=16"]
    assert all(len(run["parts"]) == PARTS and run["parts"][0]["memory_mib"] > 100 for run in (ours, *stock))
    assert ours["left"]["kl"] <= report["gate"]["most_kl_behind_the_run"]
    # The pool holds the whole corpus: only seams and questions are computed once all documents were seen.
    assert ours["parts"][-1]["reuse"] > 0.5 > max(run["parts"][-1]["reuse"] for run in stock)
