"""Takes away one memory of the model at a time and counts right answers: does it need both?

    PYTHONPATH=../../../.. python ablate.py ../model --count 200

    all        everything sees everything: full recompute
    no-kv      in the full-attention layers the question sees only itself and the system segment
    zeroed     every document and the question start with a recurrent state of zero
    added      documents are computed apart, in states and in attention; the question starts with the sum of
               their states, as if no document changed what was written before it
    composed   the same, but the states are put together with each document's transition, in order

`added` and `composed` compute every document apart but for the convolution, which still sees the three tokens
before the document, in float32; the other parts are computed in bf16, as in training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from data import gen
from export import load
from model import Model, delta_rule, scan
from torch import Tensor
from tqdm import tqdm

from benchmarks.lib.stats import share

TEST_SEED = 20_000_000
BATCH = 20


class Part(Enum):
    ALL = "all"
    NO_KV = "no-kv"
    ZEROED = "zeroed"
    ADDED = "added"
    COMPOSED = "composed"

    @property
    def apart(self) -> bool:
        return self in (Part.ADDED, Part.COMPOSED)


def attention_mask(part: Part, starts: list[int], tokens: int) -> Tensor | None:
    """Who sees whom; `starts` are those of the segments: the system's, the documents', the question's."""
    allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if part is Part.NO_KV:
        allowed[starts[-1] :, starts[1] : starts[-1]] = False
    elif part.apart:
        for start, end in pairwise(starts[1:]):
            allowed[start:end, :start] = False
    else:
        return None
    return allowed[None, None]


def apart_scan(
    part: Part, starts: list[int], q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """The delta rule with every document run from a state of zero, the question from the linked states."""
    inputs = (q, k, v, decay, beta)
    out, linked = [], torch.zeros(())
    for start, end in pairwise(starts):
        piece = [x[:, start:end] for x in inputs]
        outputs, state = delta_rule(*piece)
        out.append(outputs)
        if part is Part.COMPOSED:
            linked = transition(piece[1], piece[3], piece[4]) @ linked if linked.dim() else linked
        linked = linked + state
    outputs, _ = delta_rule(*(x[:, starts[-1] :] for x in inputs), linked)
    return torch.cat([*out, outputs], 1)


def transition(k: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """What the tokens make of the state before them, [B, H, D, D]: a scan from one that writes nothing."""
    one = torch.eye(k.shape[-1]).expand(k.shape[0], k.shape[2], -1, -1)
    _, state = delta_rule(k, k, torch.zeros_like(k), decay, beta, one)
    return state


@torch.no_grad()
def right_answers(model: Model, part: Part, prompts: list[dict]) -> list[bool]:
    """Whether every token of each answer is the most likely one after the right ones before it."""
    segments = [prompts[0]["system"], *prompts[0]["docs"]]
    starts = [sum(map(len, segments[:i])) for i in range(len(segments) + 1)]
    sequences = [gen.flat(prompt) + prompt["answer"] for prompt in prompts]
    ids = torch.full((len(sequences), max(map(len, sequences))), gen.PAD)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    keep = torch.ones(ids.shape)
    if part is Part.ZEROED:
        keep[:, starts[1:]] = 0
    model.fast = not part.apart
    link: Callable[..., Tensor] = partial(apart_scan, part, starts) if part.apart else scan
    for layer in model.model.layers:
        if not layer.full:
            layer.linear_attn.scan = link
    hidden = model(ids, model.context(keep, attention_mask(part, starts, ids.shape[1])))
    right = []
    for states, prompt, sequence in zip(hidden, prompts, sequences, strict=True):
        answer, end = prompt["answer"], len(sequence) - 1
        right.append(model.logits(states[end - len(answer) : end]).argmax(-1).tolist() == answer)
    return right


def same_lengths(prompts: list[dict]) -> bool:
    return len({tuple(map(len, [prompt["system"], *prompt["docs"]])) for prompt in prompts}) == 1


def cell(right: list[bool]) -> str:
    percent = share(right).times(100)
    return f"{percent.value:.1f} ({percent.low:.1f} to {percent.high:.1f})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("--docs", type=int, default=8)
    parser.add_argument("--doc-len", type=int, default=128)
    parser.add_argument("--facts", type=int, help="per document (default: the generator's)")
    parser.add_argument("--count", type=int, default=200, help="prompts of every kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=TEST_SEED)
    parser.add_argument("--parts", nargs="+", type=Part, default=list(Part), metavar="PART")
    args = parser.parse_args()
    model = load(args.model)
    facts = gen.default_facts(args.doc_len) if args.facts is None else args.facts
    table: dict[tuple[Part, str], list[bool]] = {}
    rounds = [(kind, part) for kind in gen.KINDS for part in args.parts]
    for kind, part in tqdm(rounds, disable=not sys.stderr.isatty()):
        right: list[bool] = []
        for start in range(0, args.count, BATCH):
            seeds = range(args.seed + start, args.seed + min(args.count, start + BATCH))
            prompts = [gen.prompt(seed, args.docs, args.doc_len, kind, facts=facts) for seed in seeds]
            assert same_lengths(prompts), "prompt() makes documents of doc_len tokens"
            right += right_answers(model, part, prompts)
        table[part, kind] = right
    print(f"{args.docs} documents of {args.doc_len} tokens, {facts} facts each, {args.count} prompts a kind")
    print(f"| {' | '.join(['', *gen.KINDS, 'all kinds'])} |\n|{'---|' * (2 + len(gen.KINDS))}")
    for part in args.parts:
        rows = [table[part, kind] for kind in gen.KINDS]
        cells = [cell(right) for right in [*rows, [x for right in rows for x in right]]]
        print(f"| {' | '.join([part.value, *cells])} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
