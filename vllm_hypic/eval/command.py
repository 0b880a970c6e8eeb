"""``python -m vllm_hypic.eval``: what reuse costs in answers, and what it saves."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from ..bench import gate, report
from ..bench.engines import Engine, described, running
from ..bench.report import check_outputs, console, output_options
from ..bench.settings import EngineSettings, engine_options, model_context
from ..demo import EXAMPLE
from ..primitives.policies import LinkError
from .methods import DEFAULT, FULL, Method, link_method, noise_name
from .results import Metric, overall
from .room import RoomError
from .runner import Outcome
from .scores import Scores
from .study import Keep, Study, StudyError, refused
from .tables import family_table, notes, overall_table, wide_console
from .task import ChatTemplate, Task
from .tasks import longbench
from .tasks.demo import FACTS, find_generator
from .tasks.english import WORDS_PER_TOKEN
from .tasks.families import FAMILIES, Source

METHODS = "full, prefix, prefix-same, hypic-W, naive-W, epic-K, seam-H-T, block"
SEED_STEP = 1_000_000
"""Tasks of different seeds are different."""
DATA_TOKENS = 512
NOISE_SEQUENCES = 64
"""``max_num_seqs`` of the second engine: vLLM wants no more than tokens in a step."""


@dataclass(frozen=True)
class Settings:
    """What was asked for, as it stands in the JSON."""

    model: str
    engine: EngineSettings
    tasks: tuple[str, ...]
    data: Path | None
    methods: tuple[str, ...]
    prompts: int
    documents: int | None
    tokens: int | None
    facts: int | None
    seed: int
    chat: bool
    chat_template: Path | None
    chat_template_kwargs: dict[str, Any]
    noise_chunk: int | None
    compare_by: str
    ttft_repeats: int


class Names(click.ParamType):
    """Different names with commas between, each of which ``read`` takes; it raises ``ValueError``."""

    name = "names"

    def __init__(self, read: Callable[[str], object]) -> None:
        self.read = read

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(part.strip() for part in value.split(","))
        for name in names:
            try:
                self.read(name)
            except ValueError as e:
                self.fail(str(e), param, ctx)
        if len(set(names)) < len(names):
            self.fail(f"{value!r}: a name stands there twice", param, ctx)
        return names


class Options(click.ParamType):
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            found = value if isinstance(value, dict) else json.loads(value)
        except ValueError as e:
            self.fail(f"{value!r} is no JSON: {e}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{value!r}: expected an object", param, ctx)
        return found


def _family(name: str) -> None:
    if name not in FAMILIES:
        raise ValueError(f"{name!r} is no family of tasks: expected {', '.join(FAMILIES)}")


def _method(name: str) -> Method:
    try:
        return link_method(name)
    except LinkError as e:
        raise ValueError(f"{name!r} is no method: expected {METHODS} ({e})") from e


@click.command(
    context_settings={"default_map": {"model": str(EXAMPLE / "model")}},
    help=(
        "Accuracy, fidelity and time to first token of every way to reuse documents, against full recompute, "
        "on the real engine. Without --model: the demo model.\n\n"
        "\b\nFamilies of tasks:\n"
        + "\n".join(f"  {name:10} {family.about}" for name, family in FAMILIES.items())
        + "\n\nThe last three are English, or in the words of a demo model for that; the others "
        "are made by the generator beside a demo model."
    ),
)
@engine_options()
@click.option(
    "--tasks", type=Names(_family), help="Families with commas between; default: all that suit the model."
)
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Also tasks of this JSON Lines file in LongBench's format; alone unless --tasks are named, too.",
)
@click.option(
    "--methods",
    type=Names(_method),
    default=",".join(DEFAULT),
    show_default=True,
    help=f"Of {METHODS}; W, K, H and T are tokens. Full recompute is always among them.",
)
@click.option(
    "--prompts", type=click.IntRange(1, SEED_STEP), default=500, show_default=True, help="Per family."
)
@click.option("--documents", type=click.IntRange(2, 256), help="In a prompt; default: the family's.")
@click.option(
    "--tokens",
    type=click.IntRange(32, 65536),
    help="In a document, about; default: the family's. Of --data: most in a segment.",
)
@click.option(
    "--facts",
    type=click.IntRange(0, 1024),
    default=FACTS,
    show_default=True,
    help="In a document of the demo model's own families; 0: its generator's default.",
)
@click.option("--seed", type=click.IntRange(0, 1000), default=0, show_default=True, help="Of the tasks.")
@click.option("--chat", is_flag=True, help="Put prompts through the model's chat template.")
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --chat: this template instead of the model's.",
)
@click.option(
    "--chat-template-kwargs",
    type=Options(),
    default="{}",
    help='With --chat: options of the template as JSON, like {"enable_thinking": false}.',
)
@click.option(
    "--noise-chunk",
    type=click.IntRange(NOISE_SEQUENCES, 1 << 20),
    default=256,
    show_default=True,
    help="max_num_batched_tokens of the stock engine that shows full recompute's own noise.",
)
@click.option("--no-noise", is_flag=True, help="Start no second engine.")
@click.option(
    "--compare-by",
    type=click.Choice([m.value for m in Metric]),
    default=Metric.EXACT.value,
    show_default=True,
    help="Metric of the table over all families, and of the plot.",
)
@click.option(
    "--ttft-repeats",
    type=click.IntRange(0, 1000),
    default=5,
    show_default=True,
    help="Prompts per family and method that are timed, one at a time; 0: none.",
)
@click.option(
    "--outcomes",
    "outcomes_path",
    type=report.REPORT_FILE,
    help="Also write every single answer here, as JSON Lines.",
)
@output_options
@gate.reporting_failures
def main(
    engine: EngineSettings,
    tasks: tuple[str, ...] | None,
    data: Path | None,
    methods: tuple[str, ...],
    prompts: int,
    documents: int | None,
    tokens: int | None,
    facts: int,
    seed: int,
    chat: bool,
    chat_template: Path | None,
    chat_template_kwargs: dict[str, Any],
    noise_chunk: int,
    no_noise: bool,
    compare_by: str,
    ttft_repeats: int,
    outcomes_path: Path | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    if click.get_current_context().get_parameter_source("size") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--size: a random model has no answers to compare; give --model")
    if not chat and (chat_template is not None or chat_template_kwargs):
        raise click.UsageError("--chat-template and --chat-template-kwargs need --chat")
    check_outputs(json_path, plot_path)
    check_outputs(outcomes_path, None)
    source = Source(find_generator(engine.model), chat, facts or None)
    settings = Settings(
        model=_model_name(engine.model),
        engine=engine,
        tasks=_names(tasks, source, data),
        data=data,
        methods=methods,
        prompts=prompts,
        documents=documents,
        tokens=tokens,
        facts=source.facts,
        seed=seed,
        chat=chat,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        noise_chunk=None if no_noise else noise_chunk,
        compare_by=compare_by,
        ttft_repeats=ttft_repeats,
    )
    made = _make(settings, source)
    with _writing(outcomes_path) as keep:
        study, facts_of_engines, skipped = _measure(settings, made, keep)
    metric = Metric(compare_by)
    over = overall(study.results, study.scores, metric)
    to = wide_console()
    for result in study.results:
        to.print(family_table(result))
    if len(study.results) > 1:
        to.print(overall_table(over, len(study.results), metric))
    for sentence in [*skipped, *(n for r in study.results for n in notes(r))]:
        to.print(sentence, soft_wrap=True)
    if json_path is not None:
        results = {
            "families": study.results,
            "overall": over,
            "skipped": skipped,
            "engines": facts_of_engines,
        }
        found = report.report("eval", settings, results, threads=engine.threads)
        found["command"] = shlex.join(["python", "-m", "vllm_hypic.eval", *sys.argv[1:]])
        report.write_json(json_path, found)
    if plot_path is not None:
        from .pareto import panels, plot

        plot(
            plot_path,
            panels(study.results, over, metric),
            title=settings.model,
            metric=metric,
        )


for _option in main.params:
    if _option.name == "size":
        cast(click.Option, _option).hidden = True


def _names(tasks: tuple[str, ...] | None, source: Source, data: Path | None) -> tuple[str, ...]:
    """Families to generate."""
    suitable = tuple(name for name, family in FAMILIES.items() if family.suits(source.generator))
    if tasks is None:
        return () if data is not None else suitable
    for name in tasks:
        if name not in suitable:
            raise click.UsageError(
                f"--tasks: {name!r} has no questions for this model; expected {', '.join(suitable)}"
            )
    return tasks


def _model_name(folder: Path) -> str:
    """The folder's name, with that of the folder around it where it says nothing itself."""
    found = folder.absolute()
    return f"{found.parent.name}/{found.name}" if found.name == "model" else found.name


def _make(settings: Settings, source: Source) -> dict[str, list[Task]]:
    """Tasks by family."""
    first = settings.seed * SEED_STEP
    made: dict[str, list[Task]] = {}
    for name in settings.tasks:
        family = FAMILIES[name]
        documents, tokens = family.shape(source, settings.documents, settings.tokens)
        try:
            made[name] = family.make(source, first, settings.prompts, documents, tokens)
        except ValueError as e:
            raise click.UsageError(f"{name}, {documents} documents of {tokens} tokens: {e}") from e
    if settings.data is not None:
        words = int((settings.tokens or DATA_TOKENS) * WORDS_PER_TOKEN)
        try:
            read = longbench.read(settings.data, limit=settings.prompts, words=words)
        except longbench.DataError as e:
            raise click.UsageError(f"--data {e}") from e
        for task in read:
            name = (
                task.family if task.family not in settings.tasks else f"{task.family} of {settings.data.name}"
            )
            made.setdefault(name, []).append(task)
    return made


def _measure(
    settings: Settings, made: Mapping[str, Sequence[Task]], keep: Keep
) -> tuple[Study, dict[str, dict[str, Any]], list[str]]:
    """The study, what the engines are, and which methods were left out and why."""
    template = ChatTemplate(
        None if settings.chat_template is None else settings.chat_template.read_text(encoding="utf-8"),
        settings.chat_template_kwargs,
    )
    context = _context(settings.engine.model, [task for tasks in made.values() for task in tasks])
    engine = Engine(settings.engine, context, hypic=True, enable_prefix_caching=True)
    engines, noise = [engine], None
    if settings.noise_chunk is not None:
        noise = Engine(
            settings.engine,
            context,
            hypic=False,
            name="noise",
            max_num_batched_tokens=settings.noise_chunk,
            max_num_seqs=NOISE_SEQUENCES,
            enable_prefix_caching=False,
        )
        engines.append(noise)
    methods = tuple(dict.fromkeys((FULL, *map(link_method, settings.methods))))
    total = sum(
        Study.pairs(len(tasks), len(methods), noise=noise is not None, ttft_repeats=settings.ttft_repeats)
        for tasks in made.values()
    )
    with report.progress(console(), total, "starting engines") as steps, running(*engines):
        reasons = refused(engine, methods)
        kept = [method for method in methods if method not in reasons]
        study = Study(
            engine,
            noise,
            "" if settings.noise_chunk is None else noise_name(settings.noise_chunk),
            kept,
            settings.chat,
            template,
            settings.ttft_repeats,
            steps,
            keep,
        )
        for family, tasks in made.items():
            try:
                study.add(family, tasks)
            except (StudyError, RoomError) as e:
                raise click.UsageError(str(e)) from e
            steps.done(len(reasons) * (len(tasks) + settings.ttft_repeats))
        facts = described(*engines)
    return study, facts, [f"{m.name} was left out: {reason}." for m, reason in reasons.items()]


def _context(model: Path, tasks: Sequence[Task]) -> int:
    """Tokens that the longest prompt takes at most, but not more than the model knows.

    Two characters a token are few in any language that is written with letters or digits.
    """
    longest = max(
        (len(t.system) + sum(map(len, t.segments)) + len(t.question)) // 2 + t.answer_tokens for t in tasks
    )
    known = model_context(model)
    return longest + 512 if known is None else min(longest + 512, known)


@contextmanager
def _writing(path: Path | None) -> Iterator[Keep]:
    """What keeps every answer; the file appears when all are in it."""
    if path is None:
        yield lambda task, method, outcome, scores: None
        return
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as lines:

        def keep(task: Task, method: str, outcome: Outcome, scores: Scores) -> None:
            line = {
                "family": task.family,
                "method": method,
                "question": task.question,
                "answers": task.answers,
                "text": outcome.text,
                "tokens": outcome.tokens,
                "computed": outcome.computed,
                **asdict(scores),
            }
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")

        yield keep
    partial.replace(path)
