"""Find the words of a text for a search, in any language and in code.

The search needs no stemming and no lists of words: a question with ``max_model_len`` or 東京 finds it beside
text of any language.  The running Python's Unicode tables define letters and their cases.
"""

from __future__ import annotations

import re
import unicodedata

# Scripts without spaces between words, and Hangul, which glues particles to words.
_UNSPACED = (
    "\u0e01-\u0e3a\u0e40-\u0e4e"  # Thai
    "\u0e80-\u0ecf"  # Lao
    "\u1000-\u1049\u1050-\u109f"  # Myanmar
    "\u1100-\u11ff"  # Hangul's letters
    "\u1780-\u17d3"  # Khmer
    "\u3005-\u3007\u3040-\u30fa\u30fc-\u30ff\u3100-\u312f\u31a0-\u31bf\u31f0-\u31ff"  # Kana, Bopomofo
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\uac00-\ud7ff"  # Hangul
)
# Parts of words that Python's \w does not match: vowel signs and other marks, common in Indic words.
_MARKS = (
    "\u0300-\u036f\u0483-\u0487"  # Latin, Greek, Cyrillic
    "\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"  # Hebrew
    "\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06dc\u06df-\u06e8\u06ea-\u06ed"  # Arabic
    "\u0900-\u0963\u0966-\u0df3"  # Indic blocks, less their full stops
    "\u0f18-\u0f39\u0f71-\u0fbc"  # Tibetan
    "\u200c\u200d"  # joiners inside Persian and Indic words
)
_WORD = re.compile(
    r"(?P<number>(?<!\w)\d+(?:\.\d+|,\d{3}(?!\d))+(?!\w))"  # 3.14, 10.0.0.1, 1,234
    rf"|(?P<unspaced>[{_UNSPACED}]+)"
    rf"|(?:[^\W{_UNSPACED}]|[{_MARKS}])+"
)
_PLAIN_WORD = re.compile(r"(?<!\w)\d+(?:\.\d+|,\d{3}(?!\d))+(?!\w)|\w+", re.ASCII)
_PARTED = re.compile(r"_|[a-z0-9][A-Z]|[A-Z][A-Z][a-z]")
_PARTS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z0-9]+")


def words_of(text: str) -> list[str]:
    """Return a text's words in order, case-folded, in compatibility form (full-width letters are letters).

    Numbers stay whole (``3.14``, ``1,234``).  Scripts without spaces give pairs of neighbouring characters,
    or a lone character as itself.  Identifiers give themselves and their parts of two characters or more, cut
    at underscores and changes of case (``maxModel_len``: ``maxmodel_len``, ``max``, ``model``, ``len``).
    """
    found: list[str] = []
    if text.isascii():
        for word in _PLAIN_WORD.findall(text):
            found.append(word.lower())
            if _PARTED.search(word):
                found += _parts(word)
        return found
    for match in _WORD.finditer(unicodedata.normalize("NFKC", text)):
        word = match.group()
        if match.lastgroup == "unspaced":
            found += [word[i : i + 2] for i in range(len(word) - 1)] or [word]
            continue
        found.append(word.casefold())
        if _PARTED.search(word):
            found += _parts(word)
    return found


def _parts(identifier: str) -> list[str]:
    """Return the parts of an identifier, case-folded; only names in ASCII are cut at changes of case."""
    parts: list[str] = []
    for name in identifier.split("_"):
        parts += _PARTS.findall(name) if name.isascii() else [name]
    return [part.casefold() for part in parts if 1 < len(part) < len(identifier)]
