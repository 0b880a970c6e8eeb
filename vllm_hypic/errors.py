"""Errors that users see, with the way out in their message."""

import re

_SECRETS = re.compile(
    r"""(://)[^\s'"]*@|(password['"]?\s*[:=]\s*)('[^']*'|"[^"]*"|[^&\s'",}]*)""", re.IGNORECASE
)


def redacted(text: str) -> str:
    """Return ``text`` with ``***`` for credentials in URLs and for values of fields named ``password``."""
    return _SECRETS.sub(lambda found: f"{found[1]}***@" if found[1] else f"{found[2]}***", text)


class ConfigError(ValueError):
    """A bad option of the plugin: the message names the value and what is allowed."""
