"""Tokenizer mode ``hypic``: the model's own tokenizer, with token primitives in its vocabulary.

The tokenizer cuts text at the primitives *before* tokenisation, and tokenises each piece by itself.  A
segment therefore has the ids of ``encode(segment, add_special_tokens=False)`` at any place in a prompt.
Stock tokenizers cannot do the cutting: Llama-style tokenizers treat the first piece of a text differently
from later pieces.  Text without primitives takes the stock path.

If text is literal, a tokenizer without primitives tokenises all text, so no text becomes a primitive's id.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from tokenizers import AddedToken
from transformers import BatchEncoding, PythonBackend, TokenizersBackend
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils import PaddingStrategy, to_py_obj
from vllm.tokenizers.hf import HfTokenizer, get_cached_tokenizer
from vllm.tokenizers.registry import (
    TokenizerRegistry,
    cached_get_tokenizer,
    get_tokenizer,
    tokenizer_args_from_config,
)

from ..cache_api.forms import WrittenTokens, has_forms, own_seal, public_text, split_forms
from ..config.engine import TOKENIZER_MODE
from ..primitives.tokens import NO_TOKENIZER, Marker, PrimitiveIds, PrimitiveTexts, split_ids, split_text

TOKENS_ENV = "HYPIC_TOKENS"
COPIED_BY_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""Environment variable with the primitives' text forms as JSON, read when a tokenizer is loaded.

vLLM passes no plugin data to a tokenizer, and loads tokenizers in several processes, which share only the
environment.  (vLLM would report a name that starts with ``VLLM_`` as unknown.)
"""


def register_mode() -> None:
    """Register mode ``hypic`` for tokenizer and renderer; calling it again changes nothing.

    vLLM's own ``HfRenderer`` (:mod:`.renderer`) renders chat templates and prompts.  The renderer tokenises
    only by the tokenizer's ``__call__``, ``encode`` and ``apply_chat_template``.
    """
    from vllm.renderers.registry import RENDERER_REGISTRY

    if TOKENIZER_MODE not in TokenizerRegistry.tokenizers:
        TokenizerRegistry.register(TOKENIZER_MODE, "vllm_hypic.engine.tokenizer", "HypicTokenizer")
    if TOKENIZER_MODE not in RENDERER_REGISTRY.renderers:
        RENDERER_REGISTRY.register(TOKENIZER_MODE, "vllm_hypic.engine.renderer", "HypicRenderer")


def refuses_model(model_config: ModelConfig) -> str | None:
    """Return why a model cannot be loaded in mode ``hypic``, or ``None`` if the mode fits.

    For some models vLLM chooses a special tokenizer or renderer (Mistral's format, Kimi K3, DeepSeek V3.2,
    ...).  Mode ``hypic`` refuses such models, because ordinary requests would change.
    """
    if model_config.skip_tokenizer_init:
        return NO_TOKENIZER
    mode = model_config.tokenizer_mode
    if mode == "auto":  # vLLM has resolved the architecture's choice, but not the repository's format
        mode = tokenizer_args_from_config(model_config)[0]
    if mode in ("hf", TOKENIZER_MODE):
        return None
    return (
        f"tokenizer mode {mode!r} has no separator tokens; use --tokenizer-mode hf if the model has a "
        "Hugging Face tokenizer, or set token_ids"
    )


def publish_texts(texts: PrimitiveTexts) -> None:
    """Make ``texts`` the text forms for tokenizers loaded from now on, here and in child processes."""
    if os.environ.get(TOKENS_ENV) != texts.to_json():
        os.environ[TOKENS_ENV] = texts.to_json()
        copied = filter(None, os.environ.get(COPIED_BY_RAY, "").split(","))
        os.environ[COPIED_BY_RAY] = ",".join(dict.fromkeys((*copied, TOKENS_ENV)))
        # vLLM's cache is keyed by a tokenizer's arguments only, and would return tokenizers with old texts.
        cached_get_tokenizer.cache_clear()


def published_texts() -> PrimitiveTexts:
    """Return the text forms in the environment, or the defaults; raise ``ValueError`` for damaged JSON."""
    value = os.environ.get(TOKENS_ENV)
    if not value:
        return PrimitiveTexts()
    try:
        return PrimitiveTexts.from_json(value)
    except ValueError as e:
        raise ValueError(f"environment variable {TOKENS_ENV}: {e}") from e


if TYPE_CHECKING:
    # A base class for type checkers only: classes that with_primitives() makes inherit from such a class.
    from transformers import TokenizersBackend as _Base
    from vllm.config import ModelConfig
else:
    _Base = object


class HypicTokenizer(_Base):
    """Mixin that :func:`with_primitives` puts before a tokenizer's own class; has no instances itself."""

    hypic_texts: PrimitiveTexts
    hypic_ids: PrimitiveIds
    _hypic_added: frozenset[str]
    _hypic_vocab: dict[str, int]
    _hypic_plain: HfTokenizer
    _hypic_literal: HfTokenizer | None
    """The model's own tokenizer without primitives, if text is literal; otherwise ``None``."""

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *args: Any,
        trust_remote_code: bool = False,
        revision: str | None = None,
        download_dir: str | None = None,
        primitive_texts: PrimitiveTexts | None = None,
        **kwargs: Any,
    ) -> HypicTokenizer:
        """Load a tokenizer exactly as vLLM's mode ``hf`` does, then add the primitives.

        ``primitive_texts`` defaults to the published texts (see :data:`TOKENS_ENV`).
        """
        cached = get_tokenizer(
            path_or_repo_id,
            *args,
            tokenizer_mode="hf",
            trust_remote_code=trust_remote_code,
            revision=revision,
            download_dir=download_dir,
            **kwargs,
        )
        plain = _without_cache(cached)
        plain.name_or_path = cached.name_or_path  # vLLM sets the name on the cached copy only
        return with_primitives(plain, published_texts() if primitive_texts is None else primitive_texts)

    def __reduce__(self) -> Any:
        return _rebuild, (self._hypic_plain, self.hypic_texts, self._hypic_added, self._hypic_literal)

    @property
    def prompt_texts(self) -> PrimitiveTexts:
        """The primitives' text forms in prompts that this process writes; the builders' argument ``texts``.
        If text is literal, the forms are secret to this process."""
        return own_seal().texts(self.hypic_ids) if self.hypic_texts.literal else self.hypic_texts

    @property
    def _own(self) -> Any:
        """The object that tokenises text without primitives: ``super()``, or literal text's tokenizer."""
        return super() if self._hypic_literal is None else self._hypic_literal

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary that the model can produce, without the added primitives.

        Structured output builds its masks from this vocabulary.  ``len``, ``max_token_id``,
        ``get_added_vocab`` and the conversions between tokens and ids know the primitives.
        """
        return self._hypic_vocab

    def __call__(self, text: Any = None, text_pair: Any = None, *args: Any, **kwargs: Any) -> BatchEncoding:
        """Tokenise as the stock method does, but text with primitives piece by piece.

        Special tokens that ``add_special_tokens`` asks for stand once, around the whole text.  Truncation
        and padding apply to the whole text.
        """
        if not self.has_primitives((text, text_pair, args, kwargs)) or kwargs.get(
            "split_special_tokens", self.split_special_tokens
        ):
            return self._own.__call__(text, text_pair, *args, **kwargs)
        options = _call_options(text, text_pair, *args, **kwargs)
        text = options.pop("text")
        add_special_tokens = options.pop("add_special_tokens", True)
        return_tensors = options.pop("return_tensors", None)
        padding_side = options.pop("padding_side", None) or self.padding_side
        multiple = options.pop("pad_to_multiple_of", None)
        padding, truncation, max_length, _ = self._get_padding_truncation_strategies(
            padding=options.pop("padding", False),
            truncation=options.pop("truncation", None),
            max_length=options.pop("max_length", None),
            pad_to_multiple_of=multiple,
            verbose=options.get("verbose", True),
        )
        keep = None if truncation == TruncationStrategy.DO_NOT_TRUNCATE else max_length
        options["verbose"] = False  # warnings about length would judge a piece, not the whole text

        is_batch = not isinstance(text, str)
        rows = [
            self._encode_pieces(t, add_special_tokens, keep, options) for t in (text if is_batch else [text])
        ]
        if padding != PaddingStrategy.DO_NOT_PAD:
            longest = max(len(row["input_ids"]) for row in rows)
            width = longest if padding == PaddingStrategy.LONGEST or max_length is None else max_length
            if multiple:
                width = -(-width // multiple) * multiple
            self._pad_rows(rows, width, padding_side)
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        if is_batch or return_tensors is not None:
            data: dict[str, Any] = columns
        else:
            data = dict(rows[0])
        if options.get("return_length"):
            data["length"] = [len(ids) for ids in columns["input_ids"]]
        return BatchEncoding(data, tensor_type=return_tensors)

    def encode(self, text: Any, text_pair: Any = None, *args: Any, **kwargs: Any) -> list[int]:
        """Encode as the stock method does, but text with primitives through :meth:`__call__`."""
        if not self.has_primitives((text, text_pair)):
            return self._own.encode(text, text_pair, *args, **kwargs)
        bound = _ENCODE.bind(None, text, text_pair, *args, **kwargs).arguments
        bound.pop("self")
        extra = bound.pop("kwargs", {})
        return self(**bound, **extra)["input_ids"]

    def tokenize(
        self, text: Any, pair: Any = None, add_special_tokens: bool = False, **kwargs: Any
    ) -> list[str]:
        """Tokenise as the stock method does, but text with primitives through :meth:`__call__`."""
        if not self.has_primitives((text, pair)):
            if isinstance(self, PythonBackend):  # its method has neither pair nor add_special_tokens
                return self._own.tokenize(text, **kwargs)
            return self._own.tokenize(text, pair, add_special_tokens=add_special_tokens, **kwargs)
        ids = self(text, pair, add_special_tokens=add_special_tokens, **kwargs)["input_ids"]
        return self.convert_ids_to_tokens(ids)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> Any:
        """Decode as the stock method does, but each piece between primitives by itself."""
        ids = token_ids if isinstance(token_ids, (int, list, tuple)) else to_py_obj(token_ids)
        if isinstance(ids, (list, tuple)) and ids and isinstance(ids[0], (list, tuple)):
            return [self.decode(row, skip_special_tokens, **kwargs) for row in ids]
        if isinstance(ids, int) or not self.hypic_ids.contains(ids):
            return super().decode(ids, skip_special_tokens=skip_special_tokens, **kwargs)
        hidden = set(self.all_special_tokens) if skip_special_tokens else frozenset[str]()
        texts = []
        for part in split_ids(ids, self.hypic_ids):
            if isinstance(part, Marker):
                marker = self.hypic_texts[part]
                texts.append("" if marker in hidden else marker)
            else:
                texts.append(super().decode(part, skip_special_tokens=skip_special_tokens, **kwargs))
        return "".join(texts)

    def has_primitives(self, value: Any) -> bool:
        """Return whether the texts in ``value`` contain forms of primitives or of written tokens."""
        if isinstance(value, str):
            literal = self.hypic_texts.literal
            return has_forms(value, literal=literal) or (not literal and self.hypic_texts.contains(value))
        if isinstance(value, dict):
            return any(self.has_primitives(v) for v in chain(value, value.values()))
        # The first element identifies lists of ids, which slow tokenizers accept, without a scan.
        if isinstance(value, (list, tuple)) and not (value and isinstance(value[0], int)):
            return any(self.has_primitives(v) for v in value)
        return False

    def pieces_of(self, text: str) -> list[str | Marker | WrittenTokens]:
        """Cut ``text`` at forms of primitives and written tokens; the texts between are tokenised alone."""
        literal = self.hypic_texts.literal
        return [
            piece
            for part in ([text] if literal else split_text(text, self.hypic_texts))
            for piece in ([part] if isinstance(part, Marker) else split_forms(part, literal=literal))
        ]

    def _encode_pieces(
        self, text: str, add_special_tokens: bool, keep: int | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Tokenise one text piece by piece, truncated to ``keep`` tokens unless ``keep`` is ``None``."""
        parts = self.pieces_of(text)
        pieces = [part for part in parts if isinstance(part, str)]
        # One call for all pieces: a fast tokenizer encodes a batch in parallel, each piece as if alone.
        # The probe gives the result's keys even if the text has primitives only.
        batch = self._own.__call__([_PROBE, *pieces], add_special_tokens=False, **options)
        keys = [key for key in batch if key != "length"]
        encoded = iter([{key: batch[key][i] for key in keys} for i in range(1, len(pieces) + 1)])
        row: dict[str, list[Any]] = {key: [] for key in keys}
        at = 0
        for part in parts:
            if isinstance(part, Marker):
                end = at + len(self.hypic_texts[part])
                fill: dict[str, Any] = {
                    "input_ids": self.hypic_ids[part],
                    "attention_mask": 1,
                    "special_tokens_mask": 1,
                    "offset_mapping": (at, end),
                }
                for key in keys:
                    row[key].append(fill.get(key, 0))
                at = end
            elif isinstance(part, WrittenTokens):
                n, end = len(part.ids), at + part.n_chars
                given: dict[str, list[Any]] = {
                    "input_ids": list(part.ids),
                    "attention_mask": [1] * n,
                    "offset_mapping": [(at, end)] * n,
                }
                for key in keys:
                    row[key].extend(given.get(key, [0] * n))
                at = end
            else:
                piece = next(encoded)
                for key in keys:
                    values = piece[key]
                    row[key].extend(
                        [(s + at, e + at) for s, e in values] if key == "offset_mapping" else values
                    )
                at += len(part)

        prefix: dict[str, list[Any]] = {key: [] for key in keys}
        suffix = prefix
        if add_special_tokens:
            prefix, suffix = self._special_tokens_around(batch["input_ids"][0], keys, options)
        if keep is not None:
            n = max(0, keep - len(prefix["input_ids"]) - len(suffix["input_ids"]))
            drop = max(0, len(row["input_ids"]) - n)
            cut = slice(drop, None) if self.truncation_side == "left" else slice(0, n)
            row = {key: values[cut] for key, values in row.items()}
        return {key: [*prefix[key], *row[key], *suffix[key]] for key in keys}

    def _special_tokens_around(
        self, probe_ids: list[int], keys: list[str], options: dict[str, Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the rows that ``add_special_tokens`` puts before and after a text.

        Each call tokenises a short probe anew, because options such as ``add_bos_token`` may change later.
        Raises ``ValueError`` if special tokens change the tokens of the probe.
        """
        whole = self._own.__call__([_PROBE], add_special_tokens=True, **options)
        ids, n = whole["input_ids"][0], len(probe_ids)
        for start in range(len(ids) - n + 1):
            if ids[start : start + n] == probe_ids:
                return (
                    {key: whole[key][0][:start] for key in keys},
                    {key: whole[key][0][start + n :] for key in keys},
                )
        raise ValueError(
            f"{type(self).__name__} tokenises text differently with special tokens ({ids} against "
            f"{probe_ids} for {_PROBE!r}): segments would not be position-independent; "
            "pass add_special_tokens=False"
        )

    def _pad_rows(self, rows: list[dict[str, Any]], width: int, side: str) -> None:
        fill = {
            "input_ids": self.pad_token_id,
            "token_type_ids": self.pad_token_type_id,
            "special_tokens_mask": 1,
            "offset_mapping": (0, 0),
        }
        for row in rows:
            for key, values in row.items():
                padding = [fill.get(key, 0)] * (width - len(values))
                row[key] = [*padding, *values] if side == "left" else [*values, *padding]


def with_primitives(tokenizer: HfTokenizer, texts: PrimitiveTexts) -> HypicTokenizer:
    """Give ``tokenizer`` the primitives; return a new object that shares the tokenizer's backend.

    A text that already is a token of the vocabulary keeps its id.  All other texts join the backend as
    special tokens, with ids behind the vocabulary.  The model needs no rows for these ids, because primitives
    never reach the model.  Raises ``ValueError`` for texts that would change how the tokenizer reads ordinary
    text and, if text is literal, for texts in the vocabulary.
    """
    if not isinstance(tokenizer, (TokenizersBackend, PythonBackend)):
        raise ValueError(
            f"{type(tokenizer).__name__}: separators need a Hugging Face tokenizer: "
            "use --tokenizer-mode hf if the model has such a tokenizer"
        )
    hidden = tokenizer._hypic_added if isinstance(tokenizer, HypicTokenizer) else frozenset[str]()
    tokenizer = _without_cache(tokenizer)
    vocab = tokenizer.get_vocab()
    for name, text in texts.items():
        if text in vocab and texts.literal:
            raise ValueError(
                f"{name}={text!r}: the vocabulary holds this text, so literal text could contain the token; "
                "choose another text"
            )
        if text in vocab:
            shown = tokenizer.decode([vocab[text]])
            if shown != text:
                raise ValueError(
                    f"{name}={text!r}: the vocabulary uses this text for {shown!r}; choose another text"
                )
        for token in chain(tokenizer.all_special_tokens, tokenizer.get_added_vocab()):
            if text != token and text in token:
                raise ValueError(f"{name}={text!r}: part of the model's token {token!r}; choose another text")
    literal = copy.deepcopy(tokenizer) if texts.literal else None
    added = [text for _, text in texts.items() if text not in vocab]
    tokens = [AddedToken(t, special=True, normalized=False, lstrip=False, rstrip=False) for t in added]
    if tokens:
        tokenizer.add_special_tokens({"extra_special_tokens": tokens}, replace_extra_special_tokens=False)
        taken = set(vocab.values())
        for text in added:
            token = tokenizer.convert_tokens_to_ids(text)
            if token is None or token in taken:
                raise ValueError(
                    f"{type(tokenizer).__name__} cannot take new tokens: {text!r} has the id {token} of "
                    "another token; configure texts that the vocabulary holds"
                )
    wrapped = _rebuild(tokenizer, texts, hidden.union(added), literal)
    for token in wrapped("")["input_ids"]:
        if (marker := wrapped.hypic_ids.marker(token)) is not None:
            raise ValueError(
                f"{marker.value}={texts[marker]!r}: the tokenizer itself puts this token around every text; "
                "choose another text"
            )
    return wrapped


def _rebuild(
    plain: HfTokenizer, texts: PrimitiveTexts, added: frozenset[str], literal: HfTokenizer | None
) -> HypicTokenizer:
    """Wrap ``plain``, whose vocabulary has the primitives; unpickling and copying also call this function."""
    cached = get_cached_tokenizer(plain)
    ids = PrimitiveIds(*(int(cached.convert_tokens_to_ids(text)) for _, text in texts.items()))
    vocab = {token: i for token, i in cached.get_vocab().items() if token not in added}
    members = {
        "hypic_texts": texts,
        "hypic_ids": ids,
        "_hypic_added": added,
        "_hypic_vocab": vocab,
        "_hypic_plain": plain,
        "_hypic_literal": literal,
        "apply_chat_template": _with_public_refusals(type(cached).apply_chat_template),
    }
    # Each object gets its own class, as with vLLM's own wrappers, so that isinstance() keeps working.
    cached.__class__ = type(f"Hypic{type(plain).__name__}", (HypicTokenizer, type(cached)), members)
    return cached


def _with_public_refusals(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``apply_chat_template`` so that errors of a template show public texts only.
    vLLM logs these errors and sends them to clients."""

    @wraps(method)  # vLLM inspects the method's parameters
    def apply_chat_template(self: HypicTokenizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except TemplateError as e:
            if (shown := public_text(str(e), self.decode)) == str(e):
                raise
            raise TemplateError(shown) from None

    return apply_chat_template


def _without_cache(tokenizer: HfTokenizer) -> HfTokenizer:
    """Return the tokenizer inside vLLM's wrapper, which caches the vocabulary.
    Raises ``ValueError`` for wrappers that vLLM's mode ``hf`` did not make."""
    if isinstance(tokenizer, HypicTokenizer):
        return tokenizer._hypic_plain
    if not hasattr(type(tokenizer), "max_token_id"):
        return tokenizer
    reduced: Any = tokenizer.__reduce__()
    make: Callable[..., Any] = reduced[0]
    arguments: Sequence[Any] = reduced[1]
    if make is not get_cached_tokenizer:
        raise ValueError(
            f"{type(tokenizer).__name__} is not a tokenizer of vLLM's mode 'hf', which separators need"
        )
    return arguments[0]


_PROBE = "a"
"""A text of at least one token in any tokenizer."""

_CALL = inspect.signature(TokenizersBackend.__call__)
_ENCODE = inspect.signature(TokenizersBackend.encode)


def _call_options(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a call's arguments by name; raise ``ValueError`` for arguments that primitives exclude."""
    options = dict(_CALL.bind(None, *args, **kwargs).arguments)
    options.pop("self")
    # As in transformers, explicit arguments win over tokenizer_kwargs, and tokenizer_kwargs over the rest.
    options = {**options.pop("kwargs", {}), **(options.pop("tokenizer_kwargs", None) or {}), **options}
    for name in (
        "text_pair",
        "text_target",
        "text_pair_target",
        "is_split_into_words",
        "return_overflowing_tokens",
        "stride",
    ):
        if options.pop(name, None):
            raise ValueError(f"{name} cannot be combined with separators in the text: remove one of them")
    text = options.get("text")
    if not isinstance(text, str) and not (
        isinstance(text, (list, tuple)) and all(isinstance(t, str) for t in text)
    ):
        raise ValueError("text with separators must be a string or a list of strings")
    return options
