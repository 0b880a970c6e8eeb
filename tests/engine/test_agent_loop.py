"""An agent's loop: a chat grows by a call and a result, and no step computes what earlier steps computed."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from api.conftest import save_byte_tokenizer
from api.test_segments import document
from api.test_structure import tool
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from primitives.test_newest import CHATS

from .conftest import EngineFactory
from .engines import Engine
from .tiny_models import save

STEPS = 20
BLOCK = 32
"""Tokens in a block of vLLM's prefix cache: a step may compute the last block of the step before again, as a
step of stock vLLM does."""
OPTIONS = {"context": "text", "islands": "query-15", "pool_bytes": 64 << 20}
TEMPLATE = (
    "<bos>system\nCall tools.{% for t in tools or [] %}\n{{ t | tojson }}{% endfor %}<eos>"
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<eos>{% endfor %}"
    "<bos>assistant\n"
)


TOOLS = [tool(i, 150) for i in range(30)]


def steps() -> list[list[dict[str, Any]]]:
    """The messages of each step, with results of 300 tokens."""
    said: list[dict[str, Any]] = [{"role": "user", "content": f"Why? {document('asked')[:200]}"}]
    found = [list(said)]
    for i in range(STEPS - 1):
        function = {"name": f"tool{i}", "arguments": json.dumps({"where": document(i)[:20]})}
        call = {"id": str(i), "type": "function", "function": function}
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})
        said.append({"role": "tool", "tool_call_id": str(i), "content": document(("result", i))[:300]})
        found.append(list(said))
    return found


Chats = list[list[dict[str, Any]]]
Loop = list[tuple[list[int], int]]
"""The prompt of each chat, and how many of its tokens were computed."""


def loop(llm: Any, chats: Chats, mode: str | None, tools: list[dict[str, Any]] | None = None) -> Loop:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, extra_args=mode and {"hypic_segment_mode": mode})
    found = []
    for said in chats:
        [output] = llm.chat([said], params, tools=tools, chat_template=TEMPLATE, use_tqdm=False)
        tokens = list(output.prompt_token_ids)
        found.append((tokens, len(tokens) - output.num_cached_tokens))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loop") / "model"
    save(path, "Qwen3", {"num_hidden_layers": 2, "max_position_embeddings": 20480})
    save_byte_tokenizer(path)
    return path


SIZES = {"block_size": BLOCK, "max_model_len": 20480}


@pytest.fixture(scope="module")
def ours(module_engine: EngineFactory, model: Path) -> Engine:
    return module_engine(model, options=OPTIONS, **SIZES)


@pytest.fixture(scope="module")
def plain(module_engine: EngineFactory, model: Path) -> Loop:
    """Stock vLLM's loop."""
    return module_engine(model, hypic=False, **SIZES).call(loop, steps(), None, TOOLS)


@pytest.mark.fast("structure")
@pytest.mark.parametrize("mode", ["structure", "text"])
def test_a_step_computes_what_is_new(ours: Engine, plain: Loop, mode: str) -> None:
    """``pytest -s -k what_is_new`` prints what each step computes, beside stock vLLM."""
    ours.reset()
    found = ours.call(loop, steps(), mode, TOOLS)
    print("\nstep: tokens, computed; stock: computed")
    for i, ((tokens, computed), (_, of_stock)) in enumerate(zip(found, plain, strict=True)):
        print(f"{i}: {len(tokens)}, {computed}; {of_stock}")
    print(f"in all: {sum(computed for _, computed in found)}; stock {sum(computed for _, computed in plain)}")
    for (before, _), (tokens, computed) in pairwise(found):
        assert computed <= 1.05 * (len(tokens) - len(before)) + BLOCK, (
            "a step computed again what another had computed"
        )
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]


def test_tools_in_another_order_are_reused(ours: Engine) -> None:
    ours.reset()
    ours.call(loop, steps()[:1], "structure", TOOLS)
    [(tokens, computed)] = ours.call(loop, steps()[:1], "structure", TOOLS[::-1])
    assert computed < 0.4 * len(tokens)


WINDOW = 24
"""Tokens, fewer than a block and than a segment have: what two texts share by chance is shorter."""


def covered(tokens: list[int], seen: set[tuple[int, ...]]) -> int:
    """How many of ``tokens`` lie in a window that is in ``seen``."""
    starts = (i for i, window in enumerate(windows(tokens)) if window in seen)
    return len({at for start in starts for at in range(start, start + WINDOW)})


def windows(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + WINDOW]) for i in range(len(tokens) - WINDOW + 1)]


@pytest.mark.fast("structure")
@pytest.mark.parametrize("mode", ["structure", "text", "cdc"])
@settings(max_examples=5, phases=(Phase.generate,))
@given(chats=st.lists(CHATS, min_size=1, max_size=2), order=st.randoms(use_true_random=False))
def test_only_what_an_earlier_request_said_is_reused(
    ours: Engine, mode: str, chats: Chats, order: Any
) -> None:
    """Each chat, the chat without its last message, and the messages of all chats in another order."""
    chats = [[{**m, "content": str(m["content"])[:300]} for m in said] for said in chats]
    mixed = [message for said in chats for message in said]
    order.shuffle(mixed)
    ours.reset()
    seen: set[tuple[int, ...]] = set()
    asked = [*chats, *(said[:-1] for said in chats if len(said) > 1), mixed]
    for tokens, computed in ours.call(loop, asked, mode):
        assert len(tokens) - computed <= covered(tokens, seen)
        seen.update(windows(tokens))
    [(tokens, computed)] = ours.call(loop, chats[:1], mode)
    assert computed < len(tokens) or len(tokens) < 4 * BLOCK, "a chat that was asked before is not reused"
