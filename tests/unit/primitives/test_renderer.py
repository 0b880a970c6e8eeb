"""Markers survive vLLM's own renderer: prompt strings, token ids, chat messages, sync and async."""

import asyncio
import logging
import re

import pytest
from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.renderers.registry import renderer_from_config

from vllm_hypic.cache_api.expand import CHAT, COMPLETIONS, rewriting
from vllm_hypic.cache_api.forms import Seal
from vllm_hypic.cache_api.rewriting import carrying, forgotten
from vllm_hypic.config.engine import TOKENIZER_MODE
from vllm_hypic.engine.renderer import HypicRenderer
from vllm_hypic.engine.tokenizer import refuses_model, register_mode
from vllm_hypic.primitives.builder import build_messages, build_prompt, build_prompt_ids
from vllm_hypic.primitives.tokens import PrimitiveTexts, primitive_ids

from .test_tokenizer import alone
from .test_tokenizer_vocabulary import pieces_of

register_mode()
T = PrimitiveTexts()
DOCUMENTS = ["The fox jumps.", " Über 東京\n", "dog"]


@pytest.fixture(params=["qwen", "llama3", "llama-legacy", "metaspace-first"])
def model_dir(request, tokenizer_dirs):
    return str(tokenizer_dirs[request.param])


def renderer_for(model_dir: str, mode: str) -> HfRenderer:
    model_config = ModelConfig(
        model=model_dir, tokenizer_mode=mode, dtype="float32", max_model_len=256, renderer_num_workers=2
    )
    return renderer_from_config(VllmConfig(model_config=model_config))


@pytest.fixture
def renderer(model_dir):
    renderer = renderer_for(model_dir, TOKENIZER_MODE)
    yield renderer
    renderer.shutdown()


@pytest.fixture
def stock(model_dir):
    renderer = renderer_for(model_dir, "hf")
    yield renderer.get_tokenizer()
    renderer.shutdown()


def tokens_of(renderer, messages, **chat) -> list[int]:
    params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, **chat})
    _, prompt = renderer.render_messages(messages, params)
    return renderer.tokenize_prompt(prompt, renderer.default_chat_tok_params)["prompt_token_ids"]


def test_the_renderer_is_vllms_own_but_for_what_it_carries(renderer):
    assert type(renderer) is HypicRenderer and HypicRenderer.__bases__ == (HfRenderer,)
    own = {name for name, value in vars(HypicRenderer).items() if callable(value)}
    assert own == {
        "__init__",
        *("render_messages", "render_messages_async", "_process_tokens", "_process_tokens_async"),
        *("render_chat_async", "render_cmpl_async", "_taken", "_public"),
    }


def test_prompt_strings(renderer, stock):
    prompt = build_prompt(system="You answer.", segments=DOCUMENTS, query="What?")
    done = renderer.tokenize_prompt({"prompt": prompt}, renderer.default_cmpl_tok_params)
    leading, *found = pieces_of(renderer.get_tokenizer(), done["prompt_token_ids"])
    assert leading == stock.encode("You answer.")
    assert found == [alone(stock, d) for d in [*DOCUMENTS, "What?"]]


async def test_prompts_and_chats_async(renderer):
    messages = build_messages(documents=DOCUMENTS, question="What?")
    chat = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
    _, prompt = await renderer.render_messages_async(messages, chat)
    made = await renderer.tokenize_prompt_async(prompt, renderer.default_chat_tok_params)
    assert made["prompt_token_ids"] == tokens_of(renderer, messages)
    prompts = [build_prompt(segments=DOCUMENTS, query=str(i)) for i in range(16)]
    params = renderer.default_cmpl_tok_params
    done = await renderer.tokenize_prompts_async([{"prompt": p} for p in prompts], params)
    expected = [renderer.tokenize_prompt({"prompt": p}, params) for p in prompts]
    assert [d["prompt_token_ids"] for d in done] == [d["prompt_token_ids"] for d in expected]


@pytest.mark.parametrize("form", ["tokens", "parts", "text"])
def test_chat_messages(renderer, stock, form):
    messages = build_messages(system="You answer.", documents=DOCUMENTS, question="What?")
    if form == "parts":  # the template decides what stands between them
        messages[-1]["content"] = [{"type": "text", "text": T.sep + t} for t in [*DOCUMENTS, "What?"]]
    tokenizer = renderer.get_tokenizer()
    if form != "text":
        ids = tokens_of(renderer, messages)
    else:  # the other path: the template gives text, which is tokenised later
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = renderer.tokenize_prompt({"prompt": text}, renderer.default_chat_tok_params)["prompt_token_ids"]
    assert pieces_of(tokenizer, ids) == [
        alone(stock, "<|im_start|>system\nYou answer.<|im_end|>\n<|im_start|>user\n"),
        *(alone(stock, d) for d in DOCUMENTS),
        alone(stock, "What?<|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_conversation_over_several_turns(renderer, stock):
    """Later turns leave the segments before them as they were."""
    first = build_messages(documents=DOCUMENTS, question="What?")
    later = {"role": "user", "content": f"{T.sep}new{T.sep}So?"}
    more = [*first, {"role": "assistant", "content": "Paris."}, later]
    tokenizer = renderer.get_tokenizer()
    found, earlier = (pieces_of(tokenizer, tokens_of(renderer, m)) for m in (more, first))
    assert found[:4] == earlier[:4]
    assert found[-2] == alone(stock, "new")


def test_token_ids_pass_the_vocabulary_check(renderer):
    ids = primitive_ids(renderer.get_tokenizer())
    prompt = build_prompt_ids(system=[5], segments=[[6, 7]], query=[8], ids=ids)
    renderer.validate_token_ids([*prompt, ids.pdep, ids.pad])
    done = renderer.tokenize_prompt({"prompt_token_ids": prompt}, renderer.default_cmpl_tok_params)
    assert done["prompt_token_ids"] == prompt


def test_truncation_and_offsets(renderer, stock):
    prompt = build_prompt(segments=DOCUMENTS, query="What is the capital of France?")
    params = TokenizeParams(max_total_tokens=256, truncate_prompt_tokens=6, return_token_offsets=True)
    full = TokenizeParams(max_total_tokens=256, return_token_offsets=True)
    whole = renderer.tokenize_prompt({"prompt": prompt}, full)
    for start, end in whole["prompt_token_offsets"]:
        assert 0 <= start <= end <= len(prompt)
    cut = renderer.tokenize_prompt({"prompt": prompt}, params)
    n_bos = len(stock.encode("a")) - len(alone(stock, "a"))
    assert len(cut["prompt_token_ids"]) == len(cut["prompt_token_offsets"]) == 6
    assert cut["prompt_token_ids"][n_bos:] == whole["prompt_token_ids"][n_bos - 6 :]
    assert cut["prompt_token_ids"][:n_bos] == whole["prompt_token_ids"][:n_bos]


def test_models_with_a_mode_of_their_own_are_refused_with_the_way_out(renderer):
    model_config = renderer.model_config
    for mode in (TOKENIZER_MODE, "hf", "auto"):
        model_config.tokenizer_mode = mode
        assert refuses_model(model_config) is None
    model_config.tokenizer_mode = "mistral"
    assert "--tokenizer-mode hf" in refuses_model(model_config)
    model_config.skip_tokenizer_init = True
    assert "token_ids" in refuses_model(model_config)


def test_a_long_prompt_is_refused_as_stock_does(renderer):
    prompt = build_prompt(segments=["dog " * 150, "fox " * 150], query="What?")
    with pytest.raises(VLLMValidationError, match="maximum context length is 256 tokens"):
        renderer.tokenize_prompt({"prompt": prompt}, renderer.default_cmpl_tok_params)


async def test_requests_at_once_are_rewritten_each_by_itself(renderer):
    """Who sends what another request's prompt becomes, at the same time or later, sends a text."""
    texts, chat = PrimitiveTexts(), ChatParams(chat_template_kwargs={"tokenize": False})
    ids, tokens = primitive_ids(renderer.get_tokenizer()), alone(renderer.get_tokenizer(), "dog")
    seals = [Seal() for _ in range(16)]
    written = [f"a{i}{seal.tokens([ids.pad, *tokens])}b" for i, seal in enumerate(seals)]
    shown = [f"a{i}{texts.pad}{renderer.get_tokenizer().decode(tokens)}b" for i in range(16)]

    async def cut(i: int) -> None:
        public = f"a{i}{texts.pad}b"
        with carrying(rewriting(COMPLETIONS, {"prompt": public}, {"prompt": written[i]}, seals[i])):
            assert forgotten()
            [prompt] = await renderer.render_cmpl_async([{"prompt": public}])
            assert not forgotten()
        messages = [[{"role": "user", "content": value}] for value in (public, written[i])]
        with carrying(rewriting(CHAT, *({"messages": m} for m in messages), seals[i])):
            [[said]], [chatted] = await renderer.render_chat_async([messages[0]], chat)
        assert all(shown[i] in found for found in (prompt["prompt"], chatted["prompt"], str(said)))
        for made in (prompt, chatted):
            at = made["prompt_token_ids"].index(ids.pad)
            assert made["prompt_token_ids"][at + 1 :][: len(tokens)] == tokens

    async def not_cut(i: int) -> None:
        [prompt] = await renderer.render_cmpl_async([{"prompt": written[i]}])
        assert ids.pad not in prompt["prompt_token_ids"] and prompt["prompt"] == written[i]

    await asyncio.gather(*(of(i) for i in range(16) for of in (cut, not_cut)))
    await asyncio.gather(*map(not_cut, range(16)))


async def test_what_a_template_says_of_a_text_it_refuses_is_public(renderer, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    seal = Seal()
    ids = primitive_ids(renderer.get_tokenizer())
    template = "{{ raise_exception('not ' ~ messages[0].content) }}"
    messages = [[{"role": "user", "content": f"a{text}"}] for text in (T.sep, seal.tokens([ids.sep]))]
    with (
        carrying(rewriting(CHAT, *({"messages": m} for m in messages), seal)),
        pytest.raises(VLLMValidationError, match=f"^not a{re.escape(T.sep)}$"),
    ):
        await renderer.render_chat_async([messages[0]], ChatParams(chat_template=template))
    assert f"not a{T.sep}" in caplog.text and "hypic_tokens" not in caplog.text
