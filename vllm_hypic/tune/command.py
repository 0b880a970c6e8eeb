"""``vllm-hypic tune``: trains the context of a model's records."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..harness import report
from ..primitives.context import SUFFIX, write_learned

if TYPE_CHECKING:
    from .training import Measured, Training

HELPS = 0.95
"""Largest part of the untrained context's KL with which a learned context is written."""


@click.command(short_help="Train the context of a model's records on documents of your own.")
@click.argument("model")
@click.option(
    "--documents",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder of at least 20 UTF-8 texts like the documents of later prompts; texts below 896 tokens "
    "are left out.",
)
@click.option(
    "--output",
    default=f"context{SUFFIX}",
    show_default=True,
    type=click.Path(path_type=Path),
    help="File to write the context to.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=150,
    show_default=True,
    help="Training steps, of one prompt each.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Longest time of training.",
)
@click.option(
    "--checks",
    type=click.IntRange(1),
    default=12,
    show_default=True,
    help="Held-out prompts that the context is measured on.",
)
@click.option("--rate", type=click.FloatRange(0), default=2e-3, show_default=True, help="Learning rate.")
@click.option("--threads", type=click.IntRange(1), help="Threads of PyTorch; by default one for each core.")
def tune(
    model: str,
    documents: Path,
    output: Path,
    steps: int,
    minutes: float,
    checks: int,
    rate: float,
    threads: int | None,
) -> None:
    """Train the context that records of MODEL are computed behind, on the texts in a folder.

    Training starts with the K and V of the text that comes with the plugin. Its steps bring prompts of
    document pieces, each computed behind the context, closer to full recompute. Training needs no labels.
    Serve with the file that the command writes: {"context_file": "context.safetensors"}. The file
    fits one model's weights. A run that was interrupted resumes where it stopped.
    """
    import torch
    from transformers import AutoTokenizer

    from ..fingerprint import weights_digest
    from ..primitives.context import context_text, context_tokens
    from .dense import Dense
    from .prompts import held_out_prompts, read_documents
    from .training import Schedule, Training, mean_kl, train

    if output.suffix != SUFFIX:
        raise click.UsageError(f"--output {output}: expected a name that ends in {SUFFIX}")
    if not (folder := output.absolute().parent).is_dir():
        raise click.UsageError(f"--output {output}: the folder {folder} does not exist")
    if threads is not None:
        torch.set_num_threads(threads)
    to = report.console()
    try:
        tokenizer, dense = AutoTokenizer.from_pretrained(model), Dense(model)
        texts, held_out = read_documents(documents, tokenizer)
    except (OSError, ValueError) as e:
        raise click.UsageError(f"{model}, {documents}: {e}") from e
    tokens = context_tokens(tokenizer, context_text(None))
    with torch.no_grad():
        start = dense.run(torch.tensor([tokens]), torch.arange(len(tokens)))[1]
    training = Training(
        dense, start, texts, held_out_prompts(held_out, checks), Schedule(steps, rate, min(25, steps))
    )
    trained_on = hashlib.sha256(repr(texts.texts).encode()).hexdigest()
    weights = weights_digest(model)
    settings = repr((weights, trained_on, tokens, steps, rate, checks))
    state = output.with_name(output.name + ".state")
    if training.resume(state, settings):
        to.print(f"resuming after {training.step} steps")
    to.print(f"{len(texts.texts)} texts, {len(tokens)} tokens; untrained: {_words(training.untrained)}")

    with report.progress(to, steps, "training") as bar:
        bar.done(training.step)

        def told(loss: float) -> None:
            bar.show(f"loss {loss:.3f}, best {mean_kl(training.best):.4f}")
            bar.done()

        train(training, seconds=60 * minutes, save=lambda: training.save(state, settings), told=told)
    _report(training, output)
    learned = training.learned
    # The pool holds unrotated K.
    raw = dense.moved(learned, -learned.positions)
    told_of = {"documents": trained_on, "steps": str(training.step), "measured": _words(training.best)}
    key, value = (x[:, 0].transpose(1, 2).to(torch.bfloat16) for x in (raw.keys, raw.values))
    write_learned(output, key, value, tokens, weights, told_of)
    state.unlink(missing_ok=True)
    options = json.dumps({"hypic": {"context_file": str(output)}})
    to.print(f"written: {output}. Serve with --additional-config '{options}'")


def _report(training: Training, output: Path) -> None:
    """Print the result; raise ``ClickException`` if training did not help."""
    from .training import mean_kl

    before, after = mean_kl(training.untrained), mean_kl(training.best)
    report.console().print(f"after {training.step} steps: {_words(training.best)}")
    if after > HELPS * before:
        raise click.ClickException(
            f"training did not help: held-out prompts have KL {after:.4f} to full recompute, "
            f"and {before:.4f} behind the untrained text. {output} was not written; keep the context 'text'"
        )


def _words(found: dict[str, Measured]) -> str:
    return "; ".join(f"{name} KL {m.kl:.4f}, NLL {m.nll:+.2f} %" for name, m in found.items())
