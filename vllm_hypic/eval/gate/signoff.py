"""Sign-offs: a JSON file for each judged subject.

The file carries a SHA-256 checksum of its own content, which reveals a file that was edited or cut off.  The
checksum is no signature: anybody can compute it again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...files import whole_file
from .criteria import Judgement
from .identity import Subject

KIND = "vllm-hypic gate"
FORMAT = 2
"""Version of the file's layout and of the verdicts' meaning, raised when either changes."""

FOLDER = "HYPIC_GATE_FOLDER"
"""Name of the environment variable that sets the default folder."""


class SignOffError(ValueError):
    """A file is no valid sign-off, or no folder can be found; the message says which and why."""


@dataclass(frozen=True)
class SignOff:
    model: str
    """Name for readers; the weights' fingerprint is in the subject."""
    subject: Subject
    judgement: Judgement
    limits: Mapping[str, float]
    """Limits of the verdict: :class:`~.criteria.Limits`."""
    by: str | None
    """Name of the person who answers for the verdict, as given on the command line."""
    time: str
    """Time in ISO 8601, UTC."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Numbers, tasks, engine, machine and versions as plain JSON, for readers and not for programs."""


def default_folder() -> Path:
    """Return ``$HYPIC_GATE_FOLDER``, or ``vllm-hypic/gates`` in the user's cache.

    Raises :class:`SignOffError` for a user without a home folder, as in some containers.
    """
    if folder := os.environ.get(FOLDER):
        return Path(folder)
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as e:
        raise SignOffError(f"the user has no folder for sign-offs: set {FOLDER} ({e})") from e
    return Path(cache) / "vllm-hypic" / "gates"


def path_in(folder: Path, subject: Subject) -> Path:
    """Return the path of a subject's sign-off."""
    return folder / f"{subject.key}.json"


def write(path: Path, sign_off: SignOff) -> None:
    """Write the sign-off atomically over an older file, and make the folder.  Raises ``OSError``."""
    content: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "key": sign_off.subject.key,
        "model": sign_off.model,
        **dataclasses.asdict(sign_off.judgement),
        "limits": dict(sign_off.limits),
        "by": sign_off.by,
        "time": sign_off.time,
        "subject": dataclasses.asdict(sign_off.subject),
        "evidence": sign_off.evidence,
    }
    text = json.dumps({**content, "sha256": _checksum(content)}, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(text)


def read(path: Path, subject: Subject | None = None) -> SignOff:
    """Return the sign-off in a file, which must be for ``subject`` if given.

    Raises :class:`SignOffError` for any other content, ``FileNotFoundError`` without a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as e:
        raise SignOffError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise SignOffError(f"{path} is not JSON") from e
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise SignOffError(f"{path} is no sign-off of the gate")
    if (found := content.get("format")) != FORMAT:
        raise SignOffError(f"{path} has format {found!r}, expected {FORMAT}: run the gate again")
    claimed = content.pop("sha256", None)
    if claimed != _checksum(content):
        raise SignOffError(f"{path} was changed since it was written: its checksum does not match")
    try:
        sign_off = SignOff(
            model=str(content["model"]),
            subject=Subject.from_mapping(content["subject"]),
            judgement=Judgement.from_mapping(content),
            limits={str(name): float(limit) for name, limit in content["limits"].items()},
            by=content["by"],
            time=str(content["time"]),
            evidence=content["evidence"],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise SignOffError(f"{path} is incomplete ({type(e).__name__}: {e}): run the gate again") from e
    if subject is not None and sign_off.subject != subject:
        raise SignOffError(f"{path} is for other settings: {'; '.join(sign_off.subject.differs(subject))}")
    return sign_off


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
