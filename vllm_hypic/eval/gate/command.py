"""``vllm-hypic gate MODEL``: judges whether reuse is good enough on a model at given settings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import click

from ...config.engine import AUTO, HypicConfig
from ...errors import ConfigError
from ...harness.engines import EngineError
from ...harness.generators import Generator, find_generator, trust_option
from ...harness.numbers import Numbers
from ...harness.report import console, machine, plain, progress, versions
from ...harness.settings import (
    EngineSettings,
    HypicOptions,
    JsonObject,
    model_folder,
    model_name,
    with_options,
)
from ...primitives.policies import MAX_SEAM_TOKENS, parse_link
from ..fitting import PoolError, TasksError, needed_context
from ..methods import Method
from ..task import ChatTemplate
from ..tasks.installed import installed_texts
from ..tasks.longbench import DataError
from .criteria import Limits, Verdict, judge
from .fixed_set import TaskSet, data_set, fixed_sets
from .identity import reads_seam
from .measure import GateEngines, GateMeasurement, MeasureError, measure
from .rendering import numbers_table, reasons_text
from .signoff import FOLDER, SignOff, SignOffError, default_folder, path_in, write
from .startup import candidates

CONTEXT = 8192
"""Context of the engines for the fixed set, in tokens, which is more than any of its prompts has."""
OURS = (
    *("model", "dtype", "attention_backend", "attention_config", "additional_config", "kv_transfer_config"),
    *("enforce_eager", "max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching"),
    *("kv_cache_memory_bytes", "scheduler_cls", "worker_cls"),
)
"""Arguments of vLLM that the gate sets itself."""
BEYOND = ("store", "segment_parallel", "gate")
"""Options that reach beyond the engine: the gate fills no tiers, opens no ports and needs no sign-off."""
PAIR_EXTRA = 2
"""Answers to each task beside the methods': full recompute, and full recompute again for the noise."""


class Exit(IntEnum):
    GO = 0
    NO_GO = 1
    """Exit code of a no-go, and of a gate that did not finish."""
    USAGE = 2
    CANNOT_JUDGE = 3


LIMITS = {
    "loss": (
        "max-loss",
        "Most points that answers may lose on average; a larger loss passes if its interval reaches 0.",
    ),
    "certain_loss": (
        "max-certain-loss",
        "No-go if the whole interval of the loss, in points, lies beyond this number.",
    ),
    "kl": (
        "max-kl",
        "Most nats between the first-token distributions of reuse and of full recompute, in 9 cases of 10.",
    ),
    "times_noise": (
        "max-noise",
        "The limit of --max-kl in noise floors; the larger of the two limits counts.",
    ),
    "changed": ("max-changed", "Most points by which reuse changes sure first tokens more than noise does."),
    "nll": ("max-nll", "Most percent by which the NLL of continued texts may rise."),
    "least_right": ("min-right", "Least points of full recompute; with fewer points the gate cannot judge."),
    "least_reused": ("min-reused", "Least percent of the reusable tokens that must be reused."),
}
"""Option and help of each limit."""


def _limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    limits = dataclasses.asdict(Limits())
    options = (
        click.option(
            f"--{option}",
            name,
            type=click.FloatRange(0),
            default=limits[name],
            show_default=True,
            help=text,
        )
        for name, (option, text) in LIMITS.items()
    )
    return with_options(command, *options)


@click.command()
@click.argument("model")
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with further tasks: JSON Lines in LongBench's format (input, context, answers).",
)
@click.option(
    "--prompts",
    type=click.IntRange(8, 100_000),
    default=96,
    show_default=True,
    help="Prompts of each set of tasks, rounded up to equally many of each family.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 1000),
    default=0,
    show_default=True,
    help="Seed of the fixed set of tasks.",
)
@click.option("--link", help="Link method to judge; by default the link method of --hypic.")
@click.option(
    "--seam-tokens",
    type=click.IntRange(0, MAX_SEAM_TOKENS),
    help="Seam window to judge; by default the seam window of --hypic.",
)
@click.option("--context", "record_context", help="Context to judge; by default the context of --hypic.")
@click.option("--islands", help="Islands to judge; by default the islands of --hypic.")
@click.option(
    "--try-seams",
    type=Numbers(click.IntRange(0, MAX_SEAM_TOKENS)),
    help="Seam windows to judge, such as 0,4,8,16; the gate recommends the narrowest that is a go.",
)
@click.option(
    "--choose",
    is_flag=True,
    help="Judge several contexts and islands, and recommend the cheapest that are a go.",
)
@click.option(
    "--hypic", type=HypicOptions(), default="{}", show_default=True, help="Options of the plugin, as JSON."
)
@click.option("--dtype", default="auto", show_default=True, help="vLLM's option --dtype.")
@click.option(
    "--engine-args",
    type=JsonObject(OURS),
    default="{}",
    show_default=True,
    help='Other arguments of vLLM, as JSON: {"quantization": "awq"}.',
)
@click.option("--eager", is_flag=True, help="Do not compile the model (vLLM's default compiles).")
@click.option(
    "--threads", type=click.IntRange(1, 512), help="OpenMP threads; by default one for each usable core."
)
@click.option(
    "--kv-gib",
    type=click.FloatRange(0.05, 4096),
    default=2.0,
    show_default=True,
    help="GiB of vLLM's KV cache in each engine; the pool comes on top.",
)
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Put prompts through the model's chat template; by default where the model has one.",
)
@click.option(
    "--chat-template-kwargs",
    type=JsonObject(),
    default='{"enable_thinking": false}',
    show_default=True,
    help="Options of the chat template, as JSON.",
)
@trust_option
@_limit_options
@click.option("--by", help="Name of the person who answers for the verdict; recorded in the sign-off.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Folder of sign-offs; default: ${FOLDER}, or vllm-hypic/gates in the user's cache.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the sign-off to this file, not to the folder.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Give up when a batch of requests, or an engine's start, takes longer.",
)
@click.pass_context
def gate(
    context: click.Context,
    /,
    model: str,
    data: Path | None,
    prompts: int,
    seed: int,
    link: str | None,
    seam_tokens: int | None,
    record_context: str | None,
    islands: str | None,
    try_seams: tuple[int, ...] | None,
    choose: bool,
    hypic: dict[str, Any],
    dtype: str,
    engine_args: dict[str, Any],
    eager: bool,
    threads: int | None,
    kv_gib: float,
    chat: bool | None,
    chat_template_kwargs: dict[str, Any],
    trust_generator: bool,
    by: str | None,
    folder: Path | None,
    out: Path | None,
    timeout_s: float,
    **limits: float,
) -> None:
    """Judge what reuse costs in answers on MODEL, a folder or a name in the hub's cache: go or no-go.

    Full recompute and reuse answer a fixed set of tasks, at the settings of the later server. The verdict,
    its reasons and the numbers go to a sign-off, which a server can ask for when it starts.

    Exit code: 0 go, 1 no-go or not finished, 2 usage, 3 cannot judge:
    full recompute itself answers too little.
    """
    path = model_folder(model)
    config = _config(hypic, link=link, seam_tokens=seam_tokens, context=record_context, islands=islands)
    if choose and (try_seams, record_context, islands) != (None, None, None):
        raise click.UsageError("--choose excludes --try-seams, --context and --islands")
    judged = _judged(config, try_seams, choose)
    if out is not None and len(judged) > 1:
        raise click.UsageError("--out names one file, but this run writes several sign-offs: use --folder")
    try:
        folder = folder or default_folder()
    except SignOffError as e:
        raise click.UsageError(str(e)) from e
    _check_writable(out.absolute().parent if out is not None else folder, path)
    try:
        own = None if data is None else data_set(data, prompts)
    except DataError as e:
        raise click.UsageError(f"--data {e}") from e
    settings = EngineSettings(
        model=path,
        threads=threads or len(os.sched_getaffinity(0)),
        eager=eager,
        kv_gib=kv_gib,
        hypic=_within(config),
        timeout_s=timeout_s,
    )
    context_tokens = needed_context(path, () if own is None else own.tasks, least=CONTEXT)
    engines = GateEngines(
        settings, context_tokens, {"dtype": dtype, "max_model_len": context_tokens, **engine_args}
    )
    tasks = _Tasks(find_generator(path, trust=trust_generator), prompts, seed, own)
    template = ChatTemplate(options=chat_template_kwargs)
    measured = _measure(engines, tuple(judged), tasks, chat, template)
    verdicts = {}
    for (method, numbers), asked in zip(measured.numbers.items(), judged.values(), strict=True):
        # The engine has resolved the options that depend on the model.
        served = replace(asked, context=method.context, islands=method.islands)
        judgement = judge(numbers, Limits(**limits))
        verdicts[method] = judgement.verdict
        sign_off = SignOff(
            model=model_name(path) if Path(model).is_dir() else model,
            subject=measured.subject.linked(served),
            judgement=judgement,
            limits=limits,
            by=by,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            evidence=_evidence(measured, method, tasks, engines, template),
        )
        console().print(numbers_table(method.name, numbers))
        console().print(reasons_text(judgement), soft_wrap=True)
        _sign(out or path_in(folder, sign_off.subject), sign_off)
    if choose or try_seams is not None:
        click.echo(_recommendation(verdicts, choose))
    context.exit(_exit(set(verdicts.values())))


def _sign(path: Path, sign_off: SignOff) -> None:
    try:
        write(path, sign_off)
    except OSError as e:
        raise click.ClickException(f"the sign-off cannot be written to {path}: {e}") from e
    click.echo(f"Signed off: {path}\n")


@dataclass(frozen=True)
class _Tasks:
    """Makes the sets of tasks for the gate."""

    generator: Generator | None
    prompts: int
    seed: int
    own: TaskSet | None

    def sets(self, chat: bool) -> list[TaskSet]:
        fixed = fixed_sets(self.generator, self.prompts, self.seed, chat=chat)
        return fixed if self.own is None else [*fixed, self.own]


def _config(hypic: Mapping[str, Any], **link_options: str | int | None) -> HypicConfig:
    given = {name: value for name, value in link_options.items() if value is not None}
    try:
        config = HypicConfig.from_mapping({**hypic, **given})
    except ConfigError as e:
        raise click.UsageError(str(e)) from e
    if not parse_link(config.link, config.seam_tokens).reuse:
        raise click.UsageError(f"link method {config.link!r} reuses nothing: judge another --link")
    return config


def _within(config: HypicConfig) -> dict[str, Any]:
    """Return the options for the gate's own engines."""
    options = {name: value for name, value in config.to_mapping().items() if name not in BEYOND}
    return {**options, "gate": {"require": "off"}}


def _judged(
    config: HypicConfig, try_seams: tuple[int, ...] | None, choose: bool
) -> dict[Method, HypicConfig]:
    """Return the methods to judge, each with its options."""
    windowed = reads_seam(config)
    if try_seams is not None and not windowed:
        raise click.UsageError(f"--try-seams: link method {config.link!r} takes no seam window")
    configs = [config]
    if try_seams is not None:
        configs = [replace(config, seam_tokens=int(w)) for w in sorted(try_seams)]
    if choose:
        try:
            configs = list(candidates(config))
        except ConfigError as e:
            raise click.UsageError(f"--choose: {e}") from e
    judged = {}
    for c in configs:
        link = f"{c.link}-{c.seam_tokens}" if windowed else c.link
        name = "/".join([link, *(part for part in (c.context, c.islands) if part not in ("none", AUTO))])
        mode = c.segment.mode
        name += "" if mode == "off" else f"@{mode}"
        judged[Method(name, c.link, c.seam_tokens, c.context, c.islands, mode)] = c
    return judged


def _check_writable(folder: Path, model: Path) -> None:
    """Make the folder, and refuse a folder that would fail, or do harm, only after the measurement."""
    folder = folder.absolute()
    if folder.resolve() == model.resolve():
        raise click.UsageError(f"{folder} is the model's own folder: name another folder for sign-offs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise click.UsageError(f"{folder}: sign-offs cannot be written there: {e.strerror}") from e


def _measure(
    engines: GateEngines,
    methods: tuple[Method, ...],
    tasks: _Tasks,
    chat: bool | None,
    template: ChatTemplate,
) -> GateMeasurement:
    total = sum(len(one.tasks) for one in tasks.sets(chat=False)) * (len(methods) + PAIR_EXTRA)
    try:
        with progress(console(), total, "starting engines") as steps:
            return measure(engines, methods, tasks.sets, chat=chat, template=template, steps=steps)
    except (EngineError, MeasureError, PoolError, TasksError) as e:
        raise click.ClickException(f"the gate did not finish: {e}") from e


def _evidence(
    measured: GateMeasurement, method: Method, tasks: _Tasks, engines: GateEngines, template: ChatTemplate
) -> dict[str, Any]:
    sets = [
        {"name": s.name, "metric": s.metric.value if s.metric else "NLL", "prompts": len(s.tasks)}
        for s in tasks.sets(measured.chat)
    ]
    return plain(
        {
            "numbers": measured.numbers[method],
            "tasks": {
                "sets": sets,
                "seed": tasks.seed,
                "texts": None if tasks.generator is not None else installed_texts().digest,
                "chat": template.options if measured.chat else None,
                "left_out": measured.left_out,
            },
            "engine": {**engines.more, **measured.described, "hypic": engines.settings.hypic},
            "machine": machine(engines.settings.threads),
            "versions": versions(),
        }
    )


def _recommendation(verdicts: Mapping[Method, Verdict], choose: bool) -> str:
    """Return a sentence with the recommended method; ``verdicts`` are in the order of the methods' costs."""
    found = next((m for m, v in verdicts.items() if v is Verdict.GO), None)
    if not choose:
        if found is None:
            return "No seam window that was tried is a go."
        return f"Recommended: seam_tokens={found.seam}, the narrowest window that is a go."
    if found is None:
        return "No context and islands that were tried are a go: serve with link 'full', or another model."
    return (
        f"Recommended: context={found.context!r}, islands={found.islands!r}, the cheapest that are a go. A "
        'server takes them with "gate": {"choose": true}.'
    )


def _exit(verdicts: set[Verdict]) -> Exit:
    """Return the exit code; a single go is enough, as the gate looks for the best of several methods."""
    if Verdict.GO in verdicts:
        return Exit.GO
    return Exit.CANNOT_JUDGE if Verdict.CANNOT_JUDGE in verdicts else Exit.NO_GO
