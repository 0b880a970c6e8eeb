"""Writes what the model is trained on: docstrings of the packages in this environment, as tokens.

    python corpus.py FOLDER       # FOLDER/tokenizer.json and FOLDER/corpus.npz: minutes

No text of the evaluation is in it: that reads Python's manual, its library's docstrings, and READMEs.
"""

from __future__ import annotations

import argparse
import ast
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
SPECIAL = ("<pad>", "<bos>", "<eos>", "<sep>")
LEAST_WORDS = 30  # of a docstring
OWN = "vllm_hypic"


def docstrings(path: Path) -> Iterator[str]:
    """Those of a Python file, in no order that matters; none where it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def texts() -> list[str]:
    """One text a file: its docstrings that stand in no earlier file."""
    root, seen, found = Path(sysconfig.get_paths()["purelib"]), set[str](), []
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] == OWN:
            continue
        new = [d for d in docstrings(path) if len(d.split()) >= LEAST_WORDS and d not in seen]
        seen.update(new)
        if new:
            found.append("\n\n".join(new))
    return found


def tokenizer_of(found: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(found[::3], trainer)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    found = texts()
    tokenizer = tokenizer_of(found)
    tokenizer.save(str(args.folder / "tokenizer.json"))
    ids = [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch(found)]
    np.savez(args.folder / "corpus.npz", ids=np.concatenate(ids), ends=np.cumsum([len(i) for i in ids]))
    print(f"{len(found):,} texts, {sum(map(len, ids)):,} tokens: {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
