"""``vllm-hypic``: joins the commands, which live with what they are about."""

from __future__ import annotations

import importlib

import click

_COMMANDS = {
    "cache": ".cache_api.command",
    "check": ".check.command",
    "explain": ".cache_api.explain_command",
    "gate": ".eval.gate.command",
    "router": ".segment_parallel.router.command",
    "suggest": ".suggest.command",
    "tune": ".tune.command",
}
"""Modules by the command that each defines; imported when it is asked for, as the others do without what it
needs."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(_COMMANDS[cmd_name], __package__)
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(cls=_Commands)
@click.version_option(package_name="vllm-hypic")
def main() -> None:
    """Position-independent caching for vLLM."""
