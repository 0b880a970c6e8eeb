"""Each mode leaves the end of a chat in the stream: the user's last message and all later messages."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.primitives.windows import Words

from .test_segmenter import prose
from .test_structure import Asked, FrontEnd, parts


@pytest.fixture(scope="module")
def front_ends(tokenizer_dirs) -> Iterator[dict[int, FrontEnd]]:
    """Front ends by ``newest_tokens``."""
    found = {n: FrontEnd(tokenizer_dirs["qwen"], newest_tokens=n, mean_tokens=64) for n in (40, 160, 400)}
    yield found
    for front_end in found.values():
        front_end.close()


QUERY = 16
"""``query_tokens`` of these front ends."""


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def placed(asked: Asked, said: Sequence[Mapping[str, Any]], rendered: str, tokenizer: Any) -> list[range]:
    """The tokens of each message's content in a prompt of :data:`MESSAGES`, in order."""
    offsets = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert len(offsets) == len(asked.ids)
    found, at = [], 0
    for message in said:
        content = message["content"]
        if not isinstance(content, str):  # vLLM joins parts
            content = "\n".join(part["text"] for part in content if part["text"])
        first = rendered.index(f"<|im_start|>{message['role']}\n{content}<|im_end|>", at)
        first += len(f"<|im_start|>{message['role']}\n")
        at = first + len(content)
        tokens = [i for i, (begin, end) in enumerate(offsets) if begin < at and end > first]
        found.append(range(tokens[0], tokens[-1] + 1) if tokens else range(0))
    return found


TEXTS = st.one_of(
    st.sampled_from(["", "Why?", '{"city": "Paris"}', "naïve 東京 \U0001f44d", "<|hypic|>", "user\n"]),
    st.builds(prose, st.integers(0, 99), st.sampled_from([15, 45, 90, 400])),
    st.lists(st.builds(prose, st.integers(0, 99), st.just(50)), min_size=2, max_size=5).map("\n\n".join),
)
CONTENTS = st.one_of(TEXTS, st.lists(TEXTS, min_size=1, max_size=4).map(lambda texts: parts(*texts)))
MARK = {"cache_control": {"type": "ephemeral"}}
MARKED = CONTENTS.map(lambda c: c if isinstance(c, str) else [*c[:-1], c[-1] | MARK])


def turns(role: str, contents: Any) -> Any:
    return contents.map(lambda content: turn(role, content))


STEPS = st.tuples(turns("assistant", TEXTS), turns("tool", CONTENTS))
TURNS = st.tuples(turns("user", MARKED), st.lists(STEPS, max_size=3)).map(lambda t: [t[0], *chain(*t[1])])
CHATS = st.tuples(
    st.lists(turns("system", TEXTS), max_size=1),
    st.lists(TURNS, min_size=1, max_size=3),
    st.lists(turns("assistant", TEXTS), max_size=1),
).map(lambda t: [*t[0], *chain(*t[1]), *t[2]])
"""Chats as clients send them: answers, calls and results of tools, begun answers."""


@pytest.mark.parametrize("mode", ["structure", "text", "cdc"])
@given(said=CHATS, newest=st.sampled_from([40, 160]))
def test_what_a_chat_ends_with_is_in_no_segment(front_ends, mode: str, said: list[Any], newest: int) -> None:
    """The last message of the user and each behind it, up to a length; segments of others are in one message
    each, and stay where they are when the chat goes on."""
    front_end = front_ends[newest]
    prompt = front_end.prompts(said)[0]
    asked = front_end.asked(prompt["prompt_token_ids"], prompt, mode)
    where = placed(asked, said, prompt["prompt"], front_end.renderers[0].get_tokenizer())
    last = max(i for i, message in enumerate(said) if message["role"] == "user")
    for start, stop in asked.spans:
        [of] = [i for i, tokens in enumerate(where) if start in tokens]
        assert stop - 1 in where[of] and (of < last or len(where[of]) > newest)


CONTINUED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
)
CALLED = [turn("assistant", '{"name": "search"}'), turn("tool", "short")]
REMINDED = [turn("system", "Reminder: be brief.")]


@pytest.mark.parametrize(
    "behind", [CALLED, REMINDED, CALLED * 2], ids=["a result", "a reminder", "two steps"]
)
@pytest.mark.parametrize("mode", ["structure", "text", "cdc"])
@pytest.mark.parametrize("glue", ["\n", "\n\n"])
def test_a_long_question_stays_where_it_was_when_the_chat_goes_on(
    front_ends, mode: str, behind: list[Any], glue: str
) -> None:
    front_end, tokenizer = front_ends[40], front_ends[40].renderers[0].get_tokenizer()
    said = [turn("user", glue.join([*(prose(i, 45) for i in range(9)), "Which code has Oslo?"]))]
    found = []
    for chat in (said, [*said, *behind]):
        prompt = front_end.prompts(chat)[0]
        asked = front_end.asked(prompt["prompt_token_ids"], prompt, mode)
        [where] = placed(asked, chat, prompt["prompt"], tokenizer)[:1]
        found.append([span for span in asked.spans if span[0] in where])
        assert max(stop for _, stop in found[-1]) <= where.stop - QUERY
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["structure", "text", "cdc"])
def test_a_long_answer_that_goes_on_is_exact_at_its_end(front_ends, mode: str) -> None:
    front_end = front_ends[40]
    said = [turn("user", "Write."), turn("assistant", " ".join(prose(i, 45) for i in range(9)))]
    prompt = front_end.prompts(said, CONTINUED)[0]
    asked = front_end.asked(prompt["prompt_token_ids"], prompt, mode)
    assert asked.spans and max(stop for _, stop in asked.spans) <= len(asked.ids) - QUERY


def test_an_empty_part_changes_no_segment(front_ends) -> None:
    """Templates write nothing of it."""
    front_end = front_ends[40]
    said = "\n\n".join(prose(i, 90) for i in range(4))
    found = []
    for texts in ([said], ["", said], [said, ""]):
        prompt = front_end.prompts([turn("user", parts(*texts))])[0]
        found.append(front_end.asked(prompt["prompt_token_ids"], prompt, "structure").segments)
    assert len(found[0]) > 1 and found[0] == found[1] == found[2]


def test_results_of_tools_are_the_newest_also_where_a_template_shows_them_as_the_users(front_ends) -> None:
    front_end = front_ends[400]
    result = f"<tool_response>\n{prose('result', 60)}\n</tool_response>"
    step = [turn("assistant", prose("call", 60)), turn("user", result)]
    said = [turn("user", f"Why? {prose('question', 60)}"), *step, *step]
    prompt = front_end.prompts(said)[0]
    ids = prompt["prompt_token_ids"]
    assert not front_end.asked(ids, prompt, "text").spans
    words = Words(front_end.finder._segments._vocabulary.texts.of, front_end.special)
    first, stop = words.question_in(ids)
    assert front_end.renderers[0].get_tokenizer().decode(ids[first:stop]) == said[0]["content"]
    assert words.question_in(sorted(front_end.special)) == (0, len(front_end.special)), "nothing is said"
