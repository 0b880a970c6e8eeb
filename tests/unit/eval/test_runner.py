"""What is asked of the engine, and in which order: on an engine that only books what it is asked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.answers.answers_file import writing_answers
from benchmarks.answers.methods import PREFIX, PREFIX_SAME, link_method
from benchmarks.answers.study import Study, first_token_times
from vllm_hypic.eval.fitting import PoolError, TasksError, refused
from vllm_hypic.eval.methods import FULL, Method
from vllm_hypic.eval.runner import evaluate
from vllm_hypic.eval.task import ChatTemplate, Example, Task, encode
from vllm_hypic.primitives.options import CONTEXT, ISLANDS, LINK, SEAM, SEGMENT

from .stand_ins import SEPARATOR, Bar, BookingEngine


def task(number: int, documents: int = 2, words: int = 4) -> Task:
    segments = tuple(" ".join(f"t{number}d{d}w{w}" for w in range(words)) for d in range(documents))
    return Task("few", "be brief", segments, f"what {number} ?", ("right",), 6)


TASKS = [task(i) for i in range(5)]
"""Two words of system, twice four of documents, three of question."""


def booked(**options: Any) -> tuple[BookingEngine, list[Example]]:
    """An engine, and the tasks as it is asked them."""
    engine = BookingEngine(**options)
    return engine, encode(engine, TASKS, chat=False)


def test_segments_are_what_stands_between_separators() -> None:
    engine = BookingEngine()
    [example] = encode(engine, [TASKS[0]], chat=False)
    assert [len(d) for d in example.prompt.documents] == [4, 4]
    assert (len(example.prompt.head), len(example.prompt.question)) == (2, 3)
    [chat] = encode(engine, [TASKS[0]], chat=True, template=ChatTemplate("mine"))
    assert chat.prompt.documents == example.prompt.documents
    assert chat.prompt.question[-1] == engine.words["mine"]
    # A segment that a template swallows is an error.
    empty = Task("few", "be brief", ("t1", " "), "what ?", ("right",), 6)
    with pytest.raises(ValueError, match="'few' has 2 segments, but its prompt has 2, of which 1 are empty"):
        encode(BookingEngine(), [empty], chat=False)


def test_every_method_starts_with_nothing_and_reuses_its_own() -> None:
    engine, examples = booked()
    done: list[int] = []
    methods = [link_method("hypic-8"), link_method("epic-2")]
    found = evaluate(engine, examples, methods, batch=3, done=done.append)
    assert list(found) == [FULL, *methods]
    assert done == [3, 2] * 3
    # Two batches each: full recompute asks once, the others before that without a question.
    assert [len(b) for b in engine.batches] == [3, 2] + [3, 3, 2, 2] * 2
    assert engine.resets == 6
    for method in methods:
        # Two documents of four, and a leading segment of two.
        assert [o.cached for o in found[method]] == [10] * 5
        assert [o.computed for o in found[method]] == [3] * 5
    assert [o.cached for o in found[FULL]] == [0] * 5
    full, warming, warm = engine.batches[0][0], engine.batches[2][0], engine.batches[3][0]
    assert full.tokens == examples[0].prompt.plain()
    assert (full.extra, full.logprobs_of, full.fresh, full.ignore_eos) == ({}, None, True, False)
    link = {LINK: "hypic", SEAM: 8, CONTEXT: "none", ISLANDS: "none", SEGMENT: "off"}
    assert warm.extra == warming.extra == link
    assert warm.logprobs_of == [11, 12, 13]
    assert warm.tokens[: len(warming.tokens)] == warming.tokens and warming.tokens[-1] == SEPARATOR
    assert [t for t in warm.tokens if t != SEPARATOR] == full.tokens
    assert (warming.max_tokens, warm.max_tokens) == (1, 6)


def test_methods_that_differ_in_islands_read_the_same_records() -> None:
    engine, examples = booked()
    names = ("hypic-8/query-10", "hypic-8/text", "hypic-8", "hypic-8/text/query-5", "block")
    methods = [link_method(name) for name in names]
    assert list(evaluate(engine, examples, methods)) == [FULL, *methods]
    assert [[a.extra.get(ISLANDS) for a in asks[:1]] for asks in engine.batches] == [
        *([None],),
        *(["query-10"], ["query-10"], ["none"]),
        *(["none"], ["none"], ["query-5"]),
        *(["none"], ["none"]),
    ]
    assert engine.resets == 4


def test_what_a_mode_finds_was_there_with_another_question() -> None:
    engine, examples = booked()
    evaluate(engine, examples, [link_method("hypic-8@cdc"), link_method("hypic-8@structure")])
    _, before, asked, _, chats = engine.batches
    for i, (one, two) in enumerate(zip(before, asked, strict=True)):
        assert one.extra[SEGMENT] == two.extra[SEGMENT] == "cdc" and not two.parts
        assert two.tokens == examples[i].prompt.plain()
        assert one.tokens[:10] == two.tokens[:10] and one.tokens[10:] != two.tokens[10:]
    assert [sum(chat.parts, ()) for chat in chats] == [tuple(chat.tokens) for chat in chats]
    assert all(len(chat.parts) == 4 for chat in chats)


@pytest.mark.parametrize(("method", "same"), [(PREFIX, False), (PREFIX_SAME, True)])
def test_what_the_prefix_cache_has_seen_before(method: Method, same: bool) -> None:
    engine, examples = booked()
    evaluate(engine, examples, [method])
    _, before, asked = engine.batches
    for i, (one, two) in enumerate(zip(before, asked, strict=True)):
        assert two.tokens == examples[i].prompt.plain()
        assert not one.fresh and not two.fresh and one.extra == two.extra == {}
        head, documents = two.tokens[:2], two.tokens[2:10]
        assert one.tokens == head + (documents if same else documents[4:] + documents[:4])


def test_a_small_pool_makes_smaller_batches() -> None:
    # A prompt takes 1 page for its leading segment and 2 for its documents.
    engine, examples = booked(pages=7)
    evaluate(engine, examples, [])
    assert [len(b) for b in engine.batches] == [2, 2, 1]
    with pytest.raises(PoolError):
        evaluate(BookingEngine(pages=2), examples, [])


def test_another_engine_is_compared_over_this_ones_tokens() -> None:
    other, (engine, examples) = BookingEngine(), booked()
    full = evaluate(engine, examples, [])[FULL]
    again = evaluate(other, examples, [], references=full)[FULL]
    assert all(ask.logprobs_of == [11, 12, 13] for batch in other.batches for ask in batch)
    assert again == full


def test_first_tokens_are_timed_alone_and_warm() -> None:
    engine, examples = booked()
    done: list[int] = []
    methods = [FULL, link_method("hypic-8"), link_method("block")]
    found = first_token_times(engine, examples, methods, 4, done=done.append)
    assert {m: s.values for m, s in found.items()} == {m: (0.5,) * 4 for m in methods}
    assert sum(done) == 12  # the first round is not counted
    assert all(len(batch) == 1 for batch in engine.batches)
    assert engine.resets == 15
    timed = [b[0] for b in engine.batches if b[0].logprobs is None]
    assert len(timed) == 15
    # Each method was first once in the three rounds after the first.
    assert [ask.extra.get(LINK) for ask in timed[3::3]] == [None, "hypic", "block", None]


def study(booking: BookingEngine, noise: Any = None, keep: Any = lambda *_: None) -> tuple[Study, Bar]:
    bar: Any = Bar()
    usual: dict[str, Any] = {"chat": False, "template": ChatTemplate(), "ttft_repeats": 2, "skipped": []}
    usual |= {"engine": booking, "noise": noise, "noise_name": "noise"}
    return Study(methods=[FULL, link_method("hypic-8")], steps=bar, keep=keep, **usual), bar


def test_a_family_is_run_scored_and_timed() -> None:
    kept: list[tuple[str, bool]] = []
    found, bar = study(BookingEngine(), BookingEngine(), lambda t, m, o, s: kept.append((m, s.exact)))
    found.add("few", TASKS)
    [result] = found.results
    assert [c.method for c in result.cells] == [FULL.name, "noise", "hypic-8"]
    assert [c.first_token is None for c in result.cells] == [False, True, False]
    assert (result.prompts, result.left_out) == (5, 0)
    assert bar.total == 5 * 3 + 2 * 2
    assert kept == [(m, True) for m in (FULL.name, "noise", "hypic-8") for _ in range(5)]


def test_prompts_that_are_longer_than_the_context_are_left_out() -> None:
    found, bar = study(BookingEngine(context=100))
    found.add("few", [*TASKS, task(9, words=40)])
    assert (found.results[0].prompts, found.results[0].left_out) == (5, 1)
    assert bar.total == 6 * 2 + 2 * 2  # the bar ends where it was said to end
    with pytest.raises(TasksError, match="few: no prompt fits the context of 20 tokens; the shortest has 13"):
        study(BookingEngine(context=20))[0].add("few", TASKS)


def test_methods_that_a_dense_model_refuses() -> None:
    methods = [FULL, link_method("naive-8"), link_method("hypic-8"), link_method("prompt-cache")]
    assert list(refused(BookingEngine(linear=False), methods)) == [methods[1]]
    hybrid = refused(BookingEngine(), methods)
    assert list(hybrid) == [methods[3]] and "fixed positions" in hybrid[methods[3]]


def test_answers_are_kept_until_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"

    def write(tasks: Sequence[Task], *, fail: bool) -> None:
        with writing_answers(path) as keep:
            study(BookingEngine(), keep=keep)[0].add("few", tasks)
            if fail:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        write(TASKS, fail=True)
    assert not path.exists()
    [partial] = tmp_path.iterdir()
    assert len(partial.read_text().splitlines()) == 10
    write(TASKS[:1], fail=False)
    assert len(path.read_text().splitlines()) == 2
    assert list(tmp_path.iterdir()) == [path]
