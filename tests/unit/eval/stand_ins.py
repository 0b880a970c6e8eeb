"""Engines that only book what they are asked, and a progress bar that nobody sees."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_hypic.eval.task import TEXTS, ChatTemplate
from vllm_hypic.harness.engine_calls import Answer, Ask
from vllm_hypic.harness.engines import Engine
from vllm_hypic.primitives.plan import PoolLimits
from vllm_hypic.primitives.policies import ModelTraits

SEPARATOR = 0
LOGPROBS = {11: -0.1, 12: -2.5, 13: -4.0}


class BookingEngine(Engine):
    """Words are tokens. A request that links reuses the documents that one before it had since the reset."""

    hypic, separator = True, SEPARATOR

    def __init__(self, *, context: int = 1000, pages: int = 100, linear: bool = True) -> None:
        self.described = {"max_model_len": context}
        self.pages, self.linear = pages, linear
        self.words = {TEXTS.sep: SEPARATOR}
        self.held: set[tuple[int, ...]] = set()
        self.batches: list[list[Ask]] = []
        self.resets = 0

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return getattr(self, function.__name__.strip("_"))(*arguments)

    def token_ids(self, texts: Sequence[Any], template: ChatTemplate) -> list[list[int]]:
        def ids(text: Any) -> list[int]:
            if not isinstance(text, str):
                text = " ".join([f"{m['role']} {m['content']}" for m in text] + [str(template.text)])
            words = text.replace(TEXTS.sep, f" {TEXTS.sep} ").split()
            return [self.words.setdefault(word, len(self.words) + 20) for word in words]

        return [ids(text) for text in texts]

    def reset(self) -> None:
        self.resets += 1
        self.held.clear()

    def generate(self, asks: Sequence[Ask]) -> list[Answer]:
        self.batches.append(list(asks))
        return [self.answer(ask) for ask in asks]

    def answer(self, ask: Ask) -> Answer:
        parts: list[list[int]] = [[]]
        for token in ask.tokens:
            parts.append([]) if token == SEPARATOR else parts[-1].append(token)
        documents = [tuple(part) for part in parts[:-1]]
        cached = sum(len(d) for d in documents if d in self.held)
        self.held.update(documents)
        logprobs = LOGPROBS if ask.logprobs_of is None else {i: LOGPROBS[i] for i in ask.logprobs_of}
        return Answer((11, 1), (0.5, 0.6), logprobs, len(ask.tokens), cached)

    def decode(self, answers: Sequence[Sequence[int]]) -> list[str]:
        return ["right" for _ in answers]

    def limits(self) -> PoolLimits:
        return PoolLimits(self.pages, 1000, 4, 1000, 1000, 1)

    def traits(self) -> ModelTraits:
        return ModelTraits(has_linear=self.linear)


class Bar:
    """A progress bar that counts."""

    def __init__(self) -> None:
        self.total = 0

    def show(self, what: str) -> None:
        pass

    def done(self, n: int = 1) -> None:
        self.total += n
