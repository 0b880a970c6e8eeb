"""Command line: one file per command, joined here."""

from __future__ import annotations

import click

from .checks import checks
from .copies import copies
from .counts import counts
from .kernels import kernels
from .model import model


@click.group(help="Benchmarks on one GPU, with random inputs and weights: torch, Triton, no vLLM, no model.")
def main() -> None:
    pass


main.add_command(checks)
main.add_command(copies)
main.add_command(counts)
main.add_command(kernels)
main.add_command(model)


if __name__ == "__main__":
    main()
