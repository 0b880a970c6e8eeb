"""Command line of the benchmarks: one file per command, joined here."""

from __future__ import annotations

import click

from .answers.plot import answers
from .criteria import criteria
from .drafts import drafts
from .eviction import eviction
from .lmcache_bench import lmcache_bench
from .load import load
from .memory import memory
from .overhead import overhead
from .prefix import prefix
from .prefix_engines import prefix_engines
from .profile import profile
from .records import records
from .scale import scale
from .seam import seam
from .segment_parallel import segment_parallel
from .soak import soak_command
from .steady import steady
from .tiers import tiers
from .ttft import ttft, ttft_length, ttft_segments


@click.group(help="Benchmarks of vllm-hypic. Each benchmark passes a correctness gate before its times.")
def main() -> None:
    pass


main.add_command(answers)
main.add_command(criteria)
main.add_command(drafts)
main.add_command(ttft)
main.add_command(ttft_length)
main.add_command(ttft_segments)
main.add_command(seam)
main.add_command(overhead)
main.add_command(memory)
main.add_command(records)
main.add_command(profile)
main.add_command(load)
main.add_command(lmcache_bench)
main.add_command(eviction)
main.add_command(prefix)
main.add_command(prefix_engines)
main.add_command(tiers)
main.add_command(scale)
main.add_command(segment_parallel)
main.add_command(soak_command, "soak")
main.add_command(steady)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
