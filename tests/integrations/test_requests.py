"""What the frameworks' clients send by default, and where mode ``text`` cuts it; no server."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from vllm_hypic.config.segmenting import SegmentingConfig
from vllm_hypic.engine.segments import segmenter_of
from vllm_hypic.primitives.token_texts import TokenTexts

from .conftest import EXAMPLES

ORDER = (3, 0, 4, 2, 1)
QUESTION = "Which office has most rooms?"
SEAM = 16
"""Tokens of a segment that are recomputed."""
RAG = ["openai_client", "langchain_stuff", "llama_index_query", "haystack_prompt_builder"]


class Prompts:
    """Prompts of recorded requests, as the server renders and cuts them by default."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template = (EXAMPLES / "tools.jinja").read_text()
        special = set(tokenizer.all_special_ids)
        self.segmenter = segmenter_of(SegmentingConfig(), TokenTexts(tokenizer), special)

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


def tokens(prompts: Prompts, documents: list[str]) -> int:
    return sum(len(prompts.tokenizer.encode(document)) for document in documents)


@pytest.mark.parametrize("name", ["llama_index_query", "haystack_prompt_builder", "langchain_stuff"])
def test_documents_may_have_paragraphs_where_their_beginning_shows(
    example, offices, recorder, prompts, name: str
) -> None:
    framework = example(name)
    options = {}
    if name == "langchain_stuff":  # nothing shows it by default
        from langchain_core.prompts import PromptTemplate

        options["document_prompt"] = PromptTemplate.from_template("<document>\n{page_content}\n</document>")
    documents = [sections(document) for document in offices.DOCUMENTS]
    for order in (range(5), ORDER):
        framework.ask(recorder.url, [documents[i] for i in order], QUESTION, **options)
    assert prompts.reused(*recorder.bodies) >= 0.8 * tokens(prompts, documents)


@pytest.mark.parametrize("name", RAG)
def test_documents_make_the_same_segments_in_another_order(
    example, offices, recorder, prompts, name: str
) -> None:
    framework = example(name)
    for order in (range(5), ORDER):
        framework.ask(recorder.url, [offices.DOCUMENTS[i] for i in order], QUESTION)
    assert prompts.reused(*recorder.bodies) >= 0.8 * tokens(prompts, offices.DOCUMENTS)


def test_llama_index_sends_completions_by_default(example, offices, recorder, prompts) -> None:
    framework = example("llama_index_query")
    for order in (range(5), ORDER):
        framework.ask(recorder.url, [offices.DOCUMENTS[i] for i in order], QUESTION, chat=False)
    assert all(isinstance(body["prompt"], str) for body in recorder.bodies)
    assert prompts.reused(*recorder.bodies) >= 0.8 * tokens(prompts, offices.DOCUMENTS)
