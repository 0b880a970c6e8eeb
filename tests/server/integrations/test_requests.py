"""What the frameworks' clients send by default, and where mode ``text`` cuts it; no server."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from vllm_hypic.config.engine import SegmentingConfig
from vllm_hypic.engine.segments import segmenter_of
from vllm_hypic.primitives.token_texts import TokenTexts, special_tokens

from .conftest import EXAMPLES, ORDER, QUESTION, RAG

SEAM = 16
"""Tokens of a segment that are recomputed."""


class Prompts:
    """Prompts of recorded requests, as the server renders and cuts them by default."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template = (EXAMPLES / "tools.jinja").read_text()
        self.segmenter = segmenter_of(SegmentingConfig(), TokenTexts(tokenizer), special_tokens(tokenizer))

    def ids(self, body: dict[str, Any]) -> list[int]:
        text = body.get("prompt")
        if text is None:
            text = self.tokenizer.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                chat_template=self.template,
                add_generation_prompt=True,
                tokenize=False,
            )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def segments(self, body: dict[str, Any]) -> list[tuple[int, ...]]:
        ids = self.ids(body)
        return [tuple(ids[start:stop]) for start, stop in self.segmenter.find(ids, "text").spans]

    def reused(self, before: dict[str, Any], after: dict[str, Any]) -> int:
        """Tokens of ``after`` whose records ``before`` has made, the leading segment left out."""
        known = set(self.segments(before))
        return sum(len(segment) - SEAM for segment in self.segments(after) if segment in known)


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> Prompts:
    return Prompts(tokenizer)


def sections(document: str) -> str:
    """A document of short paragraphs with blank lines between, as splitters leave it."""
    sentences = document.split(". ")
    return ".\n\n".join(". ".join(sentences[i : i + 4]) for i in range(0, len(sentences), 4))


def options_of(name: str) -> dict[str, Any]:
    """For documents of several paragraphs: what shows their beginning, where nothing does so by default."""
    if name != "langchain_stuff":
        return {}
    from langchain_core.prompts import PromptTemplate

    return {"document_prompt": PromptTemplate.from_template("<document>\n{page_content}\n</document>")}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "whole") for name in RAG),
        *((name, "paragraphs") for name in RAG[1:]),
        ("llama_index_query", "completion"),  # what it sends by default
    ],
)
def test_documents_make_the_same_segments_in_another_order(example, offices, recorder, prompts, name, form):
    framework = example(name)
    documents, options = offices.DOCUMENTS, {}
    if form == "paragraphs":
        documents, options = [sections(document) for document in documents], options_of(name)
    elif form == "completion":
        options = {"chat": False}
    for order in (range(5), ORDER):
        framework.ask(recorder.url, [documents[i] for i in order], QUESTION, **options)
    assert all(isinstance(body.get("prompt"), str) == (form == "completion") for body in recorder.bodies)
    tokens = sum(len(prompts.tokenizer.encode(document)) for document in documents)
    assert prompts.reused(*recorder.bodies) >= 0.8 * tokens
