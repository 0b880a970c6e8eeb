"""Write docs/reference/compatibility.md from docs/compatibility.toml.

.venv/bin/python tools/compatibility_table.py --write docs/reference/compatibility.md
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
# Compatibility

This page says which features of vLLM work beside the plugin, and names the test that shows each.
`docs/compatibility.toml` holds the data. A *plain* request has no segments, a *composed* request has
segments.

- **engine**: the named test runs the feature in an engine or a server.
- **driven**: the named test runs the CUDA code on a CPU, with stand-ins for kernels. No test has run on a
  GPU.
- **refused**: the engine does not start, or the request gets HTTP 400, with these words.
- **stock**: vLLM's own code, which the plugin does not touch; or vLLM lacks the feature there.
- **open**: neither tested nor refused.

## Versions

| vLLM | on CPU | on CUDA |
|---|---|---|
"""
MOVED = """
[Move to another vLLM](../how-to/move-to-another-vllm.md) describes `make compat`, which tests a newer
version.

## Features
"""
RUNNER = """
## The V2 model runner

The plugin does not support vLLM's V2 model runner, which vLLM has on GPUs only. Three places differ from
the V1 runner:

| what the plugin does | V1 | V2 |
|---|---|---|
| logical positions | written after `_prepare_inputs` | a Triton kernel, `prepare_pos_seq_lens`, computes \
them inside `prepare_inputs`, with the cache slots |
| tokens of records in penalties | in `SamplingMetadata` | counted in tables on the device |
| composed passes outside full CUDA graphs | `_determine_batch_execution_and_padding` | `cudagraph_utils` |

[Decisions](../decisions.md) says why.
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
