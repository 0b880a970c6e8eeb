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
    """``warn`` logs one line when the model has no sign-off, or a sign-off that is no go; ``go`` refuses to
    serve such a model; ``off`` does not look for a sign-off."""
    folder: PathText | None = None
    """Folder of sign-offs; with ``null`` the folder that ``vllm-hypic gate`` writes to by default."""
    choose: Annotated[StrictBool, Allowed("true or false")] = False
    """Serve with the cheapest context and islands signed off as go, not with ``context`` and ``islands``."""
