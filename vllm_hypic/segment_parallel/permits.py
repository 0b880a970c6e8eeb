"""Permits: only who holds the secret of segment parallelism may have records sent or awaited.

A router signs the transfer options of each request that it sends to an engine, and the engine checks that
before it looks at them.  A permit is ``UNTIL-MAC``: Unix time in whole seconds, and an HMAC-SHA256 of that
time, the request's cache salt and adapter, all its ``hypic_`` options, and, where records are to be sent, the
prompt's token ids.  Which records are awaited is said by their keys, which are digests of their tokens and
their salt: in another prompt the same permit opens nothing.  (The prompt's ids are left out there, because a
chat template may make others of a client's words at the engine than it did for the router.)
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..primitives.options import PERMIT, PREFIX, PUSH_TO, TRANSFER
from ..primitives.policies import LinkError
from .secret import secret_of

LIFETIME_S = 60
"""How long a permit is valid; as far may the clocks of router and engine be apart."""
_FORM = re.compile(r"([0-9]{1,12})-([0-9a-f]{64})")
_VERSION = "hypic permit 1"


@dataclass(frozen=True)
class Subject:
    """The request that a permit is for, besides its options.  ``lora``: the name of its adapter."""

    token_ids: Sequence[int]
    salt: str | None
    lora: str | None = None


class Permits:
    """Issues and checks permits.  Immutable; may be used by any number of threads."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        """``clock``: Unix time in seconds."""
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"hypic permit").digest()
        self._clock = clock

    @staticmethod
    @cache
    def read(path: str | None) -> Permits:
        """Of the secret in a file; ``None``: of the one that this user's processes on this machine share.

        Each file is read once.  :class:`ConfigError` names one that cannot be used.
        """
        return Permits(secret_of(path))

    def issue(self, options: Mapping[str, Any], subject: Subject) -> str:
        """The value of ``hypic_permit`` for a request with such options."""
        until = int(self._clock()) + LIFETIME_S
        return f"{until}-{self._mac(until, options, subject)}"

    def check(self, options: Mapping[str, Any], subject: Subject) -> None:
        """Raise :class:`LinkError` unless the request has no transfer options, or a permit for them."""
        given = [name for name in TRANSFER if options.get(name) is not None]
        if not given:
            return
        permit = options.get(PERMIT)
        if permit is None:
            raise LinkError(
                f"{given[0]}: only a router may send this option: expected {PERMIT}, made with this engine's "
                "secret (segment_parallel.secret_file; by default the secret of its user on its machine)"
            )
        found = _FORM.fullmatch(permit) if isinstance(permit, str) else None
        if found is None:
            raise LinkError(f"{PERMIT}={str(permit)[:100]!r}: expected UNIX_TIME-HMAC as a router makes it")
        until = int(found[1])
        if not hmac.compare_digest(found[2], self._mac(until, options, subject)):
            raise LinkError(
                f"{PERMIT} is not valid for this request: expected one made for this prompt, cache_salt "
                "and options with this engine's secret (segment_parallel.secret_file)"
            )
        left = until - self._clock()
        if not 0 < left <= 2 * LIFETIME_S:
            raise LinkError(
                f"{PERMIT} ends {left:.0f} s from now: expected 0 to {2 * LIFETIME_S}; the request "
                "came too late, or the clocks of router and engine differ"
            )

    def _mac(self, until: int, options: Mapping[str, Any], subject: Subject) -> str:
        ours = {name: value for name, value in options.items() if name.startswith(PREFIX) and name != PERMIT}
        tokens = None
        if ours.get(PUSH_TO) is not None:
            tokens = hashlib.sha256(",".join(map(str, subject.token_ids)).encode()).hexdigest()
        signed = [_VERSION, until, subject.salt, subject.lora, tokens, ours]
        text = json.dumps(signed, sort_keys=True, separators=(",", ":"), default=repr)
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()
