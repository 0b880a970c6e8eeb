"""GateConfig: what a server asks of the gate when it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from ..errors import ConfigError

Require = Literal["off", "warn", "go"]


@dataclass(frozen=True)
class GateConfig:
    """The section ``gate`` of :class:`~vllm_hypic.config.engine.HypicConfig`."""

    require: Require = "warn"
    """``warn``: one line of the log tells when the model has no sign-off, or one that is no go; ``go``: such
    a model is not served; ``off``: nobody looks."""
    folder: str | None = None
    """Folder of sign-offs; ``None``: :func:`~.signoff.default_folder`."""

    def __post_init__(self) -> None:
        if self.require not in get_args(Require):
            _refuse("require", self.require, f"one of {', '.join(get_args(Require))}")
        if self.folder is not None and (not isinstance(self.folder, str) or not self.folder):
            _refuse("folder", self.folder, "a path, or null")

    @staticmethod
    def from_mapping(options: Mapping[str, Any]) -> GateConfig:
        """Build from plain JSON-like options; :class:`ConfigError` names the first that is not allowed."""
        if not isinstance(options, Mapping):
            raise ConfigError(f"hypic config: gate={options!r}: expected an object")
        known = {f.name for f in dataclasses.fields(GateConfig)}
        if unknown := sorted(set(options) - known, key=str):
            raise ConfigError(
                f"hypic config: gate: unknown option {unknown[0]!r}; "
                f"expected one of {', '.join(sorted(known))}"
            )
        return GateConfig(**options)


def _refuse(field: str, value: object, expected: str) -> NoReturn:
    raise ConfigError(f"hypic config: gate.{field}={value!r}: expected {expected}")
