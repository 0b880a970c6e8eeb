"""Write docs/compatibility.md from docs/compatibility.toml.

.venv/bin/python tools/compatibility_table.py --write docs/compatibility.md
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

DATA = Path(__file__).resolve().parent.parent / "docs" / "compatibility.toml"
COLUMNS = {
    "plain_cpu": "plain, CPU",
    "composed_cpu": "composed, CPU",
    "plain_cuda": "plain, CUDA",
    "composed_cuda": "composed, CUDA",
}
KINDS = ("engine", "driven", "refused", "stock", "open")
INTRODUCTION = """\
# What of vLLM works beside this plugin

Written by `tools/compatibility_table.py` from `docs/compatibility.toml`; a test holds it against the tests
and messages that it names. A *plain* request has no segments, a *composed* one has.

- **engine**: the named test runs it in a real engine or server.
- **driven**: the named test drives the CUDA code on a CPU, with stand-ins for the kernels. Nothing here has
  run on a GPU.
- **refused**: at start-up, or with HTTP 400, in these words.
- **stock**: vLLM's own code, which meets nothing of this plugin's; or vLLM does not have it there.
- **open**: neither tested nor refused.

## Versions

| vLLM | on CPU | on CUDA |
|---|---|---|
"""
MOVED = """
`make compat` takes the newest vLLM from PyPI, prints which of the names and methods that this package rests
on have moved, and runs tests on its Python laid over the installed CPU kernels (`VERSION=`, `TESTS=`).

## Features
"""
RUNNER = """
## The V2 model runner

Not yet; vLLM has none on CPU. What this package does in the V1 runner has other places there. Logical
positions are written over vLLM's between `_prepare_inputs` and the model; V2 computes positions in a Triton
kernel (`prepare_pos_seq_lens`) into buffers that it also takes cache slots from, inside `prepare_inputs`.
Tokens of records are put before the sampler's penalties in `SamplingMetadata`; V2 counts tokens in tables
on the device. Passes with composed rows are kept out of full CUDA graphs by
`_determine_batch_execution_and_padding`; V2 decides in `cudagraph_utils`. Between 0.32 and 0.33 about 1,700
lines of these files changed, so they are followed when they settle.
"""


def page(data: dict[str, Any]) -> str:
    text = INTRODUCTION
    text += "".join(f"| {v['vllm']} | {v['cpu']} | {v['cuda']} |\n" for v in data["version"])
    text += MOVED
    text += f"\n| feature | {' | '.join(COLUMNS.values())} |\n|---|{'---|' * len(COLUMNS)}\n"
    for feature in data["feature"]:
        text += f"| {feature['name']} | {' | '.join(cell(feature[column]) for column in COLUMNS)} |\n"
    return text + RUNNER


def cell(field: dict[str, str]) -> str:
    ((kind, what),) = field.items()
    if kind in ("engine", "driven"):
        file, test = what.removeprefix("tests/").split("::")
        return f"**{kind}** {file} `{test.removeprefix('test_')}`"
    return f"**{kind}**: {what}"


def load() -> dict[str, Any]:
    return tomllib.loads(DATA.read_text("utf-8"))


@click.command()
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the page.")
def main(write: Path | None) -> None:
    text = page(load())
    if write is None:
        click.echo(text, nl=False)
    else:
        write.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
