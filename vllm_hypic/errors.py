"""Errors that users see, with the way out in their message."""

import re

_SECRETS = re.compile(
    r"""(://)[^\s'"]*@|(password['"]?\s*[:=]\s*)('[^']*'|"[^"]*"|[^&\s'",}]*)""", re.IGNORECASE
)


def redacted(text: str) -> str:
    """``text`` without what stands in a URL before its host, and without values called ``password``."""
    return _SECRETS.sub(lambda found: f"{found[1]}***@" if found[1] else f"{found[2]}***", text)


class ConfigError(ValueError):
    """A bad option of the plugin: the message names the value and what is allowed."""
