"""Permits: only a holder of segment parallelism's secret may request that an engine send or await records.

A router signs the transfer options of each request to an engine, and the engine checks the permit before it
uses the options.  A permit is ``UNTIL-MAC``: Unix time in whole seconds, and an HMAC-SHA256.  The MAC covers
that time, the request's cache salt, its adapter and all its ``hypic_`` options.  For a request that sends
records, the MAC also covers the prompt's token ids.  A request that awaits records names them by keys, which
are digests of tokens and salt: in another prompt its permit is useless.  Its MAC leaves the prompt's ids out,
because a chat template may give the engine other ids than it gave the router.
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
"""Validity of a permit in seconds; also the largest tolerated clock difference of router and engine."""
_FORM = re.compile(r"([0-9]{1,12})-([0-9a-f]{64})")
_VERSION = "hypic permit 1"


@dataclass(frozen=True)
class Subject:
    """The request that a permit is for, without its options.  ``lora``: name of the request's adapter."""

    token_ids: Sequence[int]
    salt: str | None
    lora: str | None = None


class Permits:
    """Issue and check permits.  Instances are immutable; any number of threads may use them."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        """Derive the signing key from ``secret``.  ``clock``: returns Unix time in seconds."""
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"hypic permit").digest()
        self._clock = clock

    @staticmethod
    @cache
    def read(path: str | None) -> Permits:
        """Return permits for the secret in a file; ``None``: the secret of this user on this machine.

        Each file is read once.  Raises :class:`ConfigError` with the name of an unusable file.
        """
        return Permits(secret_of(path))

    def issue(self, options: Mapping[str, Any], subject: Subject) -> str:
        """Return the value of ``hypic_permit`` for a request with ``options``."""
        until = int(self._clock()) + LIFETIME_S
        return f"{until}-{self._mac(until, options, subject)}"

    def check(self, options: Mapping[str, Any], subject: Subject) -> None:
        """Raise :class:`LinkError` for a request with transfer options but without a valid permit."""
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
                f"{PERMIT} is not valid for this request: expected a permit for this prompt, cache_salt "
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
