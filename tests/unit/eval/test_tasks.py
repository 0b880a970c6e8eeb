"""Tasks: their answers are in their texts, the same number is the same task, files are read or refused."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.answers.tasks import english, keyvalue, variables
from benchmarks.answers.tasks.families import FAMILIES, suits
from vllm_hypic.eval.task import TEXTS, Task
from vllm_hypic.eval.tasks import longbench
from vllm_hypic.eval.tasks.families import CONTINUATIONS, MOST_DOCUMENTS, QUESTIONS, Source, demo_tasks
from vllm_hypic.eval.tasks.installed import LEAST_WORDS, installed_texts
from vllm_hypic.eval.tasks.longbench import DataError
from vllm_hypic.harness.generators import EXAMPLE, Generator, Parts, find_generator

ENGLISH = ("needle", "keyvalue", "variables")
GENERATOR = "KINDS = {'one': 0}\nLEARNED = ()\nFACTS = None\ndef prompt(): ...\ndef vocab_words(): ...\n"


def in_english(name: str, count: int, documents: int, tokens: int) -> list[Task]:
    return FAMILIES[name].make(Source(None), 0, count, documents, tokens)


def made(name: str, generator: Generator | None, first: int = 0, count: int = 8) -> list[Task]:
    return FAMILIES[name].make(Source(generator), first, count, 5, 100)


@pytest.mark.parametrize("name", [*FAMILIES, "English"])
def test_shape_and_reproducibility(name: str, generator: Generator) -> None:
    for family in (*ENGLISH, *QUESTIONS, *CONTINUATIONS) if name == "English" else [name]:
        of = None if name == "English" else generator
        if not suits(family, of):
            with pytest.raises(ValueError, match=repr(family)):
                made(family, of)
            continue
        tasks = made(family, of)
        assert tasks == made(family, of)
        assert tasks[3:] == made(family, of, first=3, count=5)
        # Texts that go on are drawn from what is installed, of which a short one begins in few places.
        different = len({t.segments for t in tasks})
        assert different == len(tasks) or (family in CONTINUATIONS and different > len(tasks) // 2)
        for task in tasks:
            assert task.family == family
            assert len(task.segments) == 5
            assert task.system
            assert all(s.strip() for s in task.segments)
            assert not any(TEXTS.contains(s) for s in (task.system, *task.segments, task.question))


def test_demo_tasks_are_held_out_and_chats_write_the_first_words(generator: Generator) -> None:
    seeds = []

    class Recording:
        KINDS, LEARNED, FACTS = generator.KINDS, generator.LEARNED, generator.FACTS
        vocab_words = staticmethod(generator.vocab_words)

        @staticmethod
        def prompt(seed: int, *args: Any, **more: Any) -> Parts:
            seeds.append(seed)
            return generator.prompt(seed, *args, **more)

    demo_tasks(5, 2, documents=3, tokens=64, generator=Recording())
    assert seeds == [20_000_005, 20_000_006]
    # A chat template writes the first words itself.
    [plain] = demo_tasks(7, 1, documents=4, tokens=64, generator=generator)
    [chat] = demo_tasks(7, 1, documents=4, tokens=64, generator=generator, chat=True)
    assert plain.system == f"<bos> <sys> {chat.system}"


@pytest.mark.parametrize(
    ("documents", "tokens", "facts", "most"), [(4, 64, 12, 11), (4, 64, 0, 11), (100, 999, 16, 15)]
)
def test_shapes_that_a_generator_cannot_fill(
    generator: Generator, documents: int, tokens: int, facts: int, most: int
) -> None:
    """It would look for free names for ever."""
    with pytest.raises(ValueError, match=f"{facts} facts in a document: expected 1 to {most}"):
        demo_tasks(0, 1, documents=documents, tokens=tokens, generator=generator, facts=facts)
    demo_tasks(0, 1, documents=documents, tokens=tokens, generator=generator, facts=most)


@pytest.mark.parametrize("name", ["one", "two", "keyvalue", "variables"])
def test_the_largest_shapes_are_made(generator: Generator, name: str) -> None:
    [task] = FAMILIES[name].make(Source(generator), 0, 1, MOST_DOCUMENTS, 4000)
    assert len(task.segments) == MOST_DOCUMENTS


def test_generators_that_are_run_and_others(tmp_path: Path) -> None:
    assert find_generator(tmp_path / "model") is None
    future = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    (tmp_path / "gen.py").write_text(f"{future}@dataclass\nclass A:\n    x: int\n{GENERATOR}")
    found = find_generator(tmp_path / "model", trust=True)
    assert found is not None and "one" in found.KINDS
    (tmp_path / "gen.py").write_text("raise SystemExit\n")
    assert find_generator(tmp_path / "model", trust=True) is None


def test_a_foreign_generator_runs_where_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ran = tmp_path / "ran"
    foreign, mine = tmp_path / "gen.py", tmp_path / "mine" / "gen.py"
    foreign.write_text(f"open({str(ran)!r}, 'w')\n{GENERATOR}")
    assert find_generator(tmp_path / "model") is None and not ran.exists()
    assert f"{foreign} is not run, as an unknown program may do harm; --trust-generator" in caplog.text
    assert find_generator(tmp_path / "model", trust=True) is not None and ran.exists()
    mine.parent.mkdir()
    mine.symlink_to(EXAMPLE / "gen.py")
    assert find_generator(mine.parent / "model") is not None, "a link to the project's own"


def test_words_of_the_demo_model_are_used_where_there_is_a_generator(generator: Generator) -> None:
    few, dense = made("needle", generator)[0], made("keyvalue", generator)[0]
    assert few.segments[0].startswith("#") and dense.segments[0].startswith("#")

    def facts(task: Task) -> int:
        return sum(len(re.findall(r"rel\d+ val", s)) for s in task.segments)

    assert facts(few) <= 5 < 20 <= facts(dense)
    assert len(made("variables", generator)[0].question.split()) == 5


@pytest.mark.parametrize("name", ENGLISH)
def test_english_documents_have_the_length_asked_for(name: str) -> None:
    for task in in_english(name, 10, documents=6, tokens=200):
        for segment in task.segments:
            assert 150 <= len(segment.split()) <= 150 + 25  # to the end of the last sentence


def test_the_needle_stands_once() -> None:
    places = set()
    for task in in_english("needle", 30, documents=6, tokens=200):
        [key] = re.findall(r"\AQuestion: What is the secret number of the (.+)\?\nAnswer:\Z", task.question)
        [holding] = [i for i, s in enumerate(task.segments) if task.answers[0] in s]
        assert f"The secret number of the {key} is {task.answers[0]}." in task.segments[holding]
        places.add(holding)
    assert places == set(range(6))


def test_every_document_is_full_of_keys() -> None:
    for task in in_english("keyvalue", 5, documents=6, tokens=400):
        statements = [re.findall(r"The code of the (.+?) is (\d{7})\.", s) for s in task.segments]
        assert all(len(found) == 300 // keyvalue.WORDS_PER_KEY for found in statements)
        pairs = [pair for found in statements for pair in found]
        assert len({key for key, _ in pairs}) == len({value for _, value in pairs}) == len(pairs)
        [asked] = re.findall(r"code of the (.+)\?", task.question)
        assert task.answers == (dict(pairs)[asked],)
    taken: set[str] = set()
    first = english.Writer("same").number(taken)
    assert taken == {first}
    assert english.Writer("same").number(taken) != first
    # Keys do not run out.
    [task] = in_english("keyvalue", 1, documents=100, tokens=4000)
    assert sum(s.count("The code of") for s in task.segments) == english.MOST_KEYS


SET = re.compile(r"The variable (\w+) is set to (?:(\d+)|the value of (\w+))\.")


@pytest.mark.parametrize("documents", [2, 3, 8])
def test_variables_are_solved_by_reading_on(documents: int) -> None:
    for task in in_english("variables", 10, documents=documents, tokens=150):
        values: dict[str, str] = {}
        links = {}
        for place, segment in enumerate(task.segments):
            for name, value, other in SET.findall(segment):
                assert name not in values
                values[name] = value or values[other]  # what it takes was told before
                links[name] = place
        assert len(values) == variables.CHAINS * (variables.LINKS + 1)
        [asked] = re.findall(r"variable (\w+)\?", task.question)
        assert task.answers == (values[asked],)
        chain = [links[name] for name, value in values.items() if value == task.answers[0]]
        assert len(chain) == variables.LINKS + 1
        if documents >= len(chain):
            assert len(set(chain)) == len(chain)


FACT = re.compile(r"(?P<subject>ent\d+|\|) (?P<relation>rel\d+) (?P<value>(?:ent|val)\d+(?: val\d+)?) \.")
MOVE = re.compile(r"@ (?P<who>ent\d+) (?P<place>ent\d+) \.")


def read(task: Task) -> tuple[dict[tuple[str, str], list[str]], dict[str, str]]:
    """Values of every (entity, relation) in the order in which they are told, and where movers ended."""
    told: dict[tuple[str, str], list[str]] = {}
    places: dict[str, str] = {}
    for segment in task.segments:
        for fact in FACT.finditer(segment):
            subject = segment.split()[1] if fact["subject"] == "|" else fact["subject"]
            told.setdefault((subject, fact["relation"]), []).append(fact["value"])
        places |= {move["who"]: move["place"] for move in MOVE.finditer(segment)}
    return told, places


def answered(task: Task) -> str:
    """By a reader that only reads."""
    told, places = read(task)
    words = task.question.split()[1:-1]
    if words[0] == "@":
        place = places[words[1]]
        return " ".join([place, *(told[place, relation][-1] for relation in words[2:])])
    entity, *relations = words
    values = []
    for relation in relations:
        values.append(told[entity, relation][-1])
        entity = values[-1]
    return " ".join(values)


@pytest.mark.parametrize("kind", ["one", "head", "two", "latest", "both"])
def test_answers_are_in_the_documents(generator: Generator, kind: str) -> None:
    if not suits(kind, generator):
        assert kind == "both" and kind not in generator.LEARNED
        return
    for task in FAMILIES[kind].make(Source(generator), 0, 40, 6, 100):
        assert task.answers == (answered(task),)
        assert all(len(s.split()) == 100 for s in task.segments)
        assert task.answer_tokens > len(task.answers[0].split())  # and the end of the sequence


def test_the_last_move_is_not_the_only_one() -> None:
    """Else the kind asks nothing of the order of documents."""
    generator = find_generator(EXAMPLE.parent / "hybrid-notes" / "model")
    for task in FAMILIES["latest"].make(Source(generator), 0, 40, 6, 100):
        who = task.question.split()[2]
        assert sum(move["who"] == who for s in task.segments for move in MOVE.finditer(s)) >= 2


def natural(name: str, count: int) -> list[Task]:
    return in_english(name, count, FAMILIES[name].documents, FAMILIES[name].tokens)


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_gold_answer_stands_once_in_what_is_read(name: str) -> None:
    places = set()
    for task in natural(name, 30):
        [gold] = task.answers
        holding = [i for i, s in enumerate(task.segments) if re.search(rf"\b{re.escape(gold)}\b", s)]
        if name != "entries" or len(holding) == 1:  # two buildings may be of the same stone
            places.update(holding)
            assert len(holding) == 1
        assert gold not in f"{task.question} {task.opening}"
        assert task.opening and not task.opening.endswith(" ")
    documents = FAMILIES[name].documents
    assert places == ({documents - 1} if name == "updates" else set(range(documents)))


def test_what_two_hops_updates_and_prices_ask_for() -> None:
    for task in natural("hops", 20):
        asked = "^In which office does (.+) work, and what is the (.+) of that office"
        [(who, what)] = re.findall(asked, task.question)
        [works] = [s for s in task.segments if f"{who} works in the " in s]
        [city] = re.findall(rf"{who} works in the (\w+) office", works)
        told = f"The {what} of the {city} office is {task.answers[0]}."
        [tells] = [s for s in task.segments if told in s]
        assert tells != works
    for task in natural("updates", 10):
        rooms = [re.findall(r"was moved to room (\d+)\.", s) for s in task.segments]
        assert all(len(found) == 1 for found in rooms)
        assert rooms[-1] == [task.answers[0]]
    for task in natural("prices", 10):
        told = [p for s in task.segments for p in re.findall(r"The price of the (\w+) is (\d+) dollars", s)]
        assert len(dict(told)) == len(told) == 8
        assert dict(told)[task.question.split()[-1].rstrip("?")] == task.answers[0]


def test_texts_go_on_where_their_pieces_end() -> None:
    joined = {text.name: " ".join(text.sentences) for text in installed_texts().texts}
    for task in natural("in-order", 10):
        whole = " ".join(s.strip() for s in (*task.segments, task.continuation))
        assert any(whole in text for text in joined.values())
    for task in natural("mixed", 10):
        ends = [f"{s.strip()} {task.continuation}" for s in task.segments]
        assert sum(any(end in text for text in joined.values()) for end in ends) == 1
    found = installed_texts()
    assert len(found.texts) >= 40 and len(found.digest) == 16
    assert not any("vllm-hypic" in text.name for text in found.texts)
    for text in found.texts:
        assert len(text.words) >= LEAST_WORDS
        assert not any("\n" in s or "::=" in s or TEXTS.contains(s) for s in text.sentences)


def test_shapes_that_cannot_be_filled() -> None:
    with pytest.raises(ValueError, match="41 documents: expected 2 to 40"):
        in_english("facts", 1, 41, 64)
    with pytest.raises(ValueError, match="this machine has"):
        in_english("in-order", 1, 100, 1000)


LINE = {"input": "Who?", "context": "One two.\n\nThree four five.\nSix.", "answers": ["Ann", "Bob"]}
"""Of a file in LongBench's format."""


def data(folder: Path, *lines: object) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def test_lines_become_tasks(tmp_path: Path) -> None:
    [task, other] = longbench.read(data(tmp_path, LINE, "", {**LINE, "dataset": "hotpotqa"}), words=3)
    assert task.segments == ("One two.\n\n", "Three four five.\n", "Six.")
    assert task.question.endswith("Question: Who?\nAnswer:")
    assert task.answers == ("Ann", "Bob")
    assert (task.family, other.family) == ("mine", "hotpotqa")
    assert task.answer_tokens == longbench.SPARE_TOKENS + longbench.TOKENS_PER_WORD
    lines = [{**LINE, "all_classes": ["Sun", "Moon"]}, {**LINE, "input": " ", "all_classes": None}]
    classes, summary = longbench.read(data(tmp_path, *lines))
    assert "Answer with one of: Sun, Moon." in classes.question
    assert longbench.SUMMARISE in summary.question
    path = data(tmp_path, LINE, LINE, "not JSON")
    assert len(longbench.read(path, limit=2)) == 2
    with pytest.raises(DataError, match="line 3"):
        longbench.read(path, limit=3)


@pytest.mark.parametrize("words", [1, 2, 7, 50, 10_000])
def test_segments_are_the_context(tmp_path: Path, words: int) -> None:
    paragraphs = [" ".join(f"w{i}.{j}" for j in range(i * 7 % 31 + 1)) for i in range(20)]
    context = "\n \n" + "\n\n".join(paragraphs) + "\n\n\n"
    [task] = longbench.read(data(tmp_path, {**LINE, "context": context}), words=words)
    assert "".join(task.segments) == context
    sizes = [len(s.split()) for s in task.segments]
    assert all(0 < size <= words for size in sizes)
    if words >= 50:  # no paragraph is longer
        assert all(s.endswith("\n") for s in task.segments)
        for segment, later in pairwise(task.segments):
            first = next(line for line in later.split("\n") if line.strip())
            assert len(segment.split()) + len(first.split()) > words  # else it would stand in there, too


def without(field: str) -> dict[str, Any]:
    return {k: v for k, v in LINE.items() if k != field}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: expected an object"),
        (without("input"), "line 2: there is no field 'input'"),
        (without("context"), "line 2: there is no field 'context'"),
        (without("answers"), "line 2: there is no field 'answers'"),
        ({**LINE, "context": 3}, "line 2: 'context' is no text: 3"),
        ({**LINE, "context": " \n"}, "line 2: 'context' is empty"),
        ({**LINE, "context": f"a {TEXTS.sep} b"}, "line 2: 'context' holds the text of a token primitive"),
        ({**LINE, "answers": []}, "line 2: 'answers' is no list of texts: \\[\\]"),
        ({**LINE, "answers": "Ann"}, "line 2: 'answers' is no list of texts: 'Ann'"),
        ({**LINE, "answers": [1]}, "line 2: 'answers' is no list of texts"),
        ({**LINE, "all_classes": "Sun"}, "line 2: 'all_classes' is no list of texts"),
        ({**LINE, "dataset": 5}, "line 2: 'dataset' is no text"),
    ],
)
def test_faults_are_told_with_file_line_and_field(tmp_path: Path, line: object, says: str) -> None:
    path = data(tmp_path, LINE, line)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}, {says}"):
        longbench.read(path)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no tasks"):
        longbench.read(data(tmp_path, ""))
    with pytest.raises(DataError, match="cannot be read"):
        longbench.read(tmp_path / "none.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        longbench.read(tmp_path / "binary.jsonl")
