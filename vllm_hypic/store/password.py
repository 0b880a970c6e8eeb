"""The password of a Redis tier: from a file or the environment, where neither ``ps`` nor logs show it."""

from __future__ import annotations

import os
from pathlib import Path

from ..config.store import RedisConfig


def password_of(tier: RedisConfig) -> str | None:
    """Return the tier's password, or ``None`` if the tier has none.  Raises ``ValueError`` with the name
    of a file or variable without a password; no message shows the content of either."""
    if tier.password_file is not None:
        where = f"password_file={tier.password_file!r}"
        try:
            found = Path(tier.password_file).read_text().strip()
        except OSError as e:
            raise ValueError(f"{where}: cannot be read: {e.strerror}") from e
        except UnicodeDecodeError:
            raise ValueError(f"{where}: expected text in UTF-8") from None
    elif tier.password_env is not None:
        where = f"password_env={tier.password_env!r}"
        found = os.environ.get(tier.password_env, "")
    else:
        return None
    if not found:
        raise ValueError(f"{where}: expected a password, found nothing")
    return found
