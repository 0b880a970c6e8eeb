"""Command line of the probes: one file per command, joined here."""

from __future__ import annotations

import click

from .attention import attention
from .drift import drift
from .dtype import dtype
from .length import length


@click.group(help="Differences between reuse and full recompute inside the model, beside the noise floor.")
def main() -> None:
    pass


for command in (drift, attention, length, dtype):
    main.add_command(command)


if __name__ == "__main__":
    main()
