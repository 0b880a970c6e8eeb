"""What the examples ask: a question over eight documents, made for the demo model by its generator."""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "models" / "tiny-hybrid-qa"
MODEL = str(FOLDER / "model")
CHAT_TEMPLATE = (FOLDER / "chat_template.jinja").read_text()

sys.path.insert(0, str(FOLDER))
import gen  # noqa: E402

_WORDS = gen.vocab_words()
_PARTS = gen.prompt(seed=20_000_000, n_docs=8, doc_len=128, kind="two", facts=2)


def _text(ids):
    return " ".join(_WORDS[i] for i in ids)


SYSTEM = _text(_PARTS["system"][2:])  # the chat template, or PREFIX, gives <bos> <sys>
PREFIX = "<bos> <sys> "
DOCUMENTS = [_text(document) for document in _PARTS["docs"]]
QUESTION = _text(_PARTS["question"])
ANSWER = _text(_PARTS["answer"][:-1])
