"""``vllm-hypic suggest`` on logs of which the right answer is known."""

import json
import random
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.suggest.command import suggest

WORDS = "fox dog lazy quick document capital river France Paris Seine brown question naive".split()  # noqa: SIM905
FIELDS = (
    "{% for t in tools or [] %}<tool><name>{{ t.function.name }}</name>"
    "{% for name, p in t.function.parameters.properties.items() %}<p>{{ name }}: {{ p.description }}</p>"
    "{% endfor %}</tool>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
"""A template that writes tools by their fields, as some models' do."""
SEP = "<|hypic_sep|>"


def prose(seed: object, sentences: int) -> str:
    rng = random.Random(f"suggest {seed}")
    said = (" ".join(rng.choices(WORDS, k=rng.randrange(5, 14))).capitalize() for _ in range(sentences))
    return ". ".join(said) + "."


def user(text: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


DOCUMENTS = [prose(i, 20) for i in range(5)]
TAGGED = [
    "\n".join([*(f"<document>\n{DOCUMENTS[i]}\n</document>" for i in order), f"Why {n}?"])
    for n, order in enumerate(list(permutations(range(5), 3))[::6])
]


def tool(i: int) -> dict[str, Any]:
    properties = {f"part{n}": {"type": "string", "description": prose((i, n), 4)} for n in range(4)}
    function = {"name": f"tool{i}", "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def exchanged_tools() -> list[dict[str, Any]]:
    tools = [tool(i) for i in range(8)]
    return [user("Why?", tools=tools[i:] + tools[:i]) for i in range(8)]


def edited_text() -> list[dict[str, Any]]:
    """A long text without paragraphs, of which a sentence changes each time."""
    sentences = prose("long", 500).split(". ")
    log = []
    for n in range(8):
        sentences[50 + 50 * n] = f"This is edit {n}"
        log.append(user(f"{'. '.join(sentences)} And why?"))
    return log


def conversation() -> list[dict[str, Any]]:
    said = [{"role": "assistant" if n % 2 else "user", "content": prose(("turn", n), 12)} for n in range(31)]
    return [{"messages": said[:n]} for n in range(1, 32, 2)]


def separated() -> list[dict[str, Any]]:
    return [
        {"prompt": SEP.join(["You answer.", *(DOCUMENTS[i] for i in order), "Which river?"])}
        for order in permutations(range(4), 3)
    ]


KNOWN: dict[str, tuple[list[dict[str, Any]], str]] = {
    "text": ([{"prompt": text} for text in TAGGED], "text"),
    "structure": (exchanged_tools(), "structure"),
    "cdc": (edited_text(), "cdc, 512"),
    "prefix": (conversation(), "prefix caching alone"),
    "off": (separated(), "off"),
}


@pytest.fixture
def run(smollm2: Path, tmp_path: Path) -> Callable[..., Any]:
    """Run the command on a log; its JSON, or what it printed where it failed."""

    def run(log: str | list[dict[str, Any]], *options: str, stdin: bool = False) -> Any:
        if not isinstance(log, str):
            log = "".join(json.dumps(line) + "\n" for line in log)
        path = tmp_path / "log.jsonl"
        path.write_text(log)
        (tmp_path / "template.jinja").write_text(FIELDS)
        template = ("--chat-template", str(tmp_path / "template.jinja"))
        arguments = ["-" if stdin else str(path), "--model", str(smollm2), *template, *options]
        result = CliRunner().invoke(suggest, arguments, input=log if stdin else None)
        if result.exit_code:
            assert isinstance(result.exception, SystemExit), result.exc_info
            return result.output
        return json.loads(result.stdout) if "--json" in options else result.stdout

    return run


@pytest.mark.parametrize("log", KNOWN)
def test_the_right_answer_is_recommended(run: Callable[..., Any], log: str) -> None:
    requests, right = KNOWN[log]
    found = run(requests, "--json")
    reuse = {c["name"]: c["reuse"] for c in found["candidates"]}
    assert found["recommended"] == right, reuse
    assert (found["prompts"], found["tenants"]) == (len(requests), 1)
    if right == "prefix caching alone":
        assert found["additional_config"] is None and reuse[right] > 0.8
    else:
        assert reuse[right] > reuse["prefix caching alone"] + 0.15
        options = HypicConfig.from_mapping(found["additional_config"]["hypic"]).segment
        assert options.mode == right.partition(",")[0] and options.mean_tokens in (512, 2048)


def test_what_is_printed(run: Callable[..., Any]) -> None:
    shown = run(KNOWN["text"][0], "--hypic", '{"seam_tokens": 4, "segment": {"min_tokens": 64}}')
    assert '{"hypic": {"seam_tokens": 4, "segment": {"min_tokens": 64, "mode": "text"}}}' in shown
    assert "The replay assumes unlimited memory" in shown and "text, documents" in shown
    assert "text, fences" not in shown, "it finds nothing"
    assert "vLLM's prefix cache alone reuses as much" in run(conversation()[:6])


def test_seams_are_not_reused(run: Callable[..., Any]) -> None:
    def off(seam: int, islands: str) -> dict[str, Any]:
        options = json.dumps({"seam_tokens": seam, "islands": islands})
        candidates = run(separated(), "--json", "--hypic", options)["candidates"]
        return next(c for c in candidates if c["name"] == "off")

    short, long, islands = off(4, "none"), off(8, "none"), off(8, "query-20")
    segments, cold = 3 * 24, 4
    lost = short["reused_tokens"] - long["reused_tokens"]
    assert lost == pytest.approx((segments - cold) * 8, rel=0.05), "a little of it is in the streams' cache"
    assert islands["reuse"] < 0.9 * long["reuse"]


def test_batches_and_standard_input_are_read(run: Callable[..., Any]) -> None:
    log = KNOWN["text"][0]
    batch = [{"custom_id": str(i), "url": "/v1/completions", "body": body} for i, body in enumerate(log)]
    assert run("\n\n".join(map(json.dumps, batch)), "--json", stdin=True) == run(log, "--json")
    assert run([{"prompt": [body["prompt"] for body in log]}], "--json") == run(log, "--json")


def test_tenants_share_nothing(run: Callable[..., Any]) -> None:
    log = [user(text, cache_salt=f"tenant {n}") for n, text in enumerate(TAGGED[:4])]
    apart, together = run(log, "--json"), run([*log, *log], "--json")
    assert apart["tenants"] == together["tenants"] == 4
    assert all(c["reused_tokens"] == 0 for c in apart["candidates"])
    reuse = {c["name"]: c["reuse"] for c in together["candidates"]}
    assert min(reuse["text"], reuse["prefix caching alone"]) > 0.4


def test_what_has_no_segments_is_not_cut_and_images_are_left_out(run: Callable[..., Any]) -> None:
    log = [{**body, "prompt_logprobs": 1} for body in KNOWN["text"][0]]
    assert {c["in_segments"] for c in run(log, "--json")["candidates"]} == {0.0}
    image = user([{"type": "image_url", "image_url": {"url": "http://localhost:1/a.png"}}])
    assert run([user("Why?"), image], "--json")["requests_left_out"] == 1
    assert "no prompts of text alone; 1 requests left out" in run([image])
    parts = [{"type": "text", "text": "fox"}, {"type": "hypic_sep"}]
    for prompt in (parts, [parts, "fox"]):
        assert run([{"prompt": "fox"}, {"prompt": prompt}], "--json")["requests_left_out"] == 1
    assert "no prompts" in run("\n\n")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "the line is not JSON"),
        ("[1]", "expected a request with messages or prompt"),
        ('{"input": "Why?"}', "found input: expected a request"),
        ('{"body": null}', "found NoneType: expected a request"),
        ('{"messages": "Why?"}', "messages"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{}]}', "messages"),
        ('{"messages": [{"role": "user", "content": 5}]}', "messages"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": 5}', "tools"),
        ('{"messages": [{"role": "user", "content": "x"}], "cache_salt": ""}', "cache_salt"),
        ('{"prompt": {}}', "prompt"),
        ('{"prompt": 3}', "prompt"),
        ('{"prompt": ""}', "prompt"),
        ('{"prompt": [99999999]}', "99999999"),
        ('{"prompt": "x", "temperature": -1}', "temperature"),
        (json.dumps({"prompt": "fox " * 9000}), "8192"),
        (json.dumps(user("Why?", chat_template="{{ 1 }}")), "Chat template is passed with request"),
    ],
)
def test_a_bad_line_is_named(run: Callable[..., Any], line: str, says: str) -> None:
    found = run(f'{{"prompt": "Why?"}}\n\n{line}\n')
    assert "log.jsonl, line 3: " in found and says in found


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--hypic", '{"link": "full"}'), "reuses nothing"),
        (("--hypic", '{"segment": {"min_tokens": 0}}'), "expected an integer >= 1"),
        (("--model", "no/model"), "neither a folder nor a model"),
        (("--chat-template", "/none.jinja"), "/none.jinja"),
        (("--engine-args", '{"max_modell_len": 1}'), "max_modell_len"),
        (("--block-size", "0"), "0 is not in the range"),
    ],
)
def test_bad_options_are_named(run: Callable[..., Any], options: tuple[str, ...], says: str) -> None:
    assert says in run([user("Why?")], *options)
