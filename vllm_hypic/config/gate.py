"""GateConfig: what a server asks of the gate when it starts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import StrictBool

from .schema import Allowed, ConfigSection, PathText, options


@options
class GateConfig(ConfigSection):
    """The section ``gate`` of :class:`~vllm_hypic.config.engine.HypicConfig`."""

    section = "gate"

    require: Annotated[Literal["off", "warn", "go"], Allowed()] = "warn"
    """``warn``: one line of the log tells when the model has no sign-off, or one that is no go; ``go``: such
    a model is not served; ``off``: nobody looks."""
    folder: PathText | None = None
    """Folder of sign-offs; ``None``: :func:`~.signoff.default_folder`."""
    choose: Annotated[StrictBool, Allowed("true or false")] = False
    """Take the cheapest context and islands that are a go, instead of the ones that are named."""
