"""Errors that users see, with the way out in their message."""


class ConfigError(ValueError):
    """A bad option of the plugin: the message names the value and what is allowed."""
