"""``python -m benchmarks.answers``: measures what reuse costs in answers, and the time that it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource
from rich.console import Console

from vllm_hypic.eval import estimates
from vllm_hypic.eval.fitting import PoolError, TasksError, needed_context, refused
from vllm_hypic.eval.methods import FULL, Method
from vllm_hypic.eval.runner import SEQUENCES, noise_engine
from vllm_hypic.eval.scores import Metric
from vllm_hypic.eval.task import ChatTemplate, Task
from vllm_hypic.eval.tasks.families import SEED_STEP, Source
from vllm_hypic.eval.tasks.installed import installed_texts
from vllm_hypic.harness.engine_calls import FORCING
from vllm_hypic.harness.engines import Engine, running
from vllm_hypic.harness.generators import EXAMPLE, find_generator, trust_option
from vllm_hypic.harness.settings import EngineSettings, JsonObject, model_name
from vllm_hypic.primitives.policies import LinkError

from ..lib import gate, report
from ..lib.report import check_outputs, described, output_options
from ..lib.settings import Names, engine_options
from .answers_file import writing_answers
from .methods import DEFAULT, link_method, noise_name
from .results import FamilyResult, TextResult, overall
from .selection import Settings, family_names, has_chat_template, make_tasks
from .study import Keep, Study
from .tables import family_table, notes, overall_table, text_table, wide_console
from .tasks.families import FAMILIES, shape

METHODS = "full, prefix, prefix-same, hypic-W, naive-W, epic-K, seam-H-T, seam-H-T+A, block"
"""Methods; a context, islands and a mode may follow a link method: see :func:`.methods.link_method`."""


def _family(name: str) -> None:
    if name not in FAMILIES:
        raise ValueError(f"{name!r} is not a family of tasks: expected {', '.join(FAMILIES)}")


def _method(name: str) -> Method:
    try:
        return link_method(name)
    except LinkError as e:
        raise ValueError(f"{name!r} is not a method: expected {METHODS} ({e})") from e


@click.command(
    context_settings={"default_map": {"model": str(EXAMPLE / "model")}},
    help=(
        "Accuracy, fidelity and time to first token of every way to reuse documents, against full recompute, "
        "on the real engine. Without --model: the demo model.\n\n"
        "\b\nFamilies of tasks:\n"
        + "\n".join(f"  {name:10} {family.about}" for name, family in FAMILIES.items())
        + "\n\nThe generator beside a demo model makes the demo model's own families. needle, keyvalue and "
        "variables are English, or in a demo model's words. Installed texts make all other families."
    ),
)
@engine_options()
@click.option(
    "--tasks", type=Names(_family), help="Families, separated by commas; default: all of the model."
)
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON Lines file of tasks in LongBench's format; other tasks are added only with --tasks.",
)
@click.option(
    "--methods",
    type=Names(_method),
    default=",".join(DEFAULT),
    show_default=True,
    help=f"Some of {METHODS}; W, K, H, T and A are tokens. Full recompute always runs.",
)
@click.option(
    "--prompts", type=click.IntRange(1, SEED_STEP), default=500, show_default=True, help="Prompts per family."
)
@click.option("--documents", type=click.IntRange(2, 256), help="Documents per prompt; default: the family's.")
@click.option(
    "--tokens",
    type=click.IntRange(32, 65536),
    help="Approximate tokens of a document; default: the family's. With --data: limit for a segment.",
)
@click.option(
    "--facts",
    type=click.IntRange(1, 1024),
    help="Facts in a document of the demo model's own families; default: all that the model can hold.",
)
@click.option("--seed", type=click.IntRange(0, 1000), default=0, show_default=True, help="Seed of the tasks.")
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Apply the chat template to prompts; default: if the model has a chat template.",
)
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Chat template to use instead of the model's.",
)
@click.option(
    "--chat-template-kwargs",
    type=JsonObject(),
    default="{}",
    help='Options of the chat template as JSON, like {"enable_thinking": false}.',
)
@click.option(
    "--noise-chunk",
    type=click.IntRange(SEQUENCES, 1 << 20),
    default=256,
    show_default=True,
    help="max_num_batched_tokens of the stock engine that shows full recompute's own noise.",
)
@click.option("--no-noise", is_flag=True, help="Do not measure the noise: start no second engine.")
@click.option(
    "--compare-by",
    type=click.Choice([m.value for m in Metric]),
    default=Metric.CONTAINS.value,
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
    help="Also write every single answer to this file, as JSON Lines.",
)
@trust_option
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
    facts: int | None,
    seed: int,
    chat: bool | None,
    chat_template: Path | None,
    chat_template_kwargs: dict[str, Any],
    noise_chunk: int,
    no_noise: bool,
    compare_by: str,
    ttft_repeats: int,
    outcomes_path: Path | None,
    trust_generator: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    if click.get_current_context().get_parameter_source("size") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--size: a random model has no answers to compare; give --model")
    if chat is None:
        chat = chat_template is not None or has_chat_template(engine.model)
    if not chat and (chat_template is not None or chat_template_kwargs):
        raise click.UsageError(
            "--chat-template and --chat-template-kwargs have no effect: "
            "the model has no chat template, or --no-chat is given"
        )
    check_outputs(json_path, plot_path)
    check_outputs(outcomes_path, None)
    source = Source(find_generator(engine.model, trust=trust_generator), chat, facts)
    families = family_names(tasks, source, data)
    settings = Settings(
        model=model_name(engine.model),
        engine=engine,
        tasks=families,
        data=data,
        methods=methods,
        prompts=prompts,
        documents=documents,
        tokens=tokens,
        facts=source.facts,
        seed=seed,
        shapes={name: shape(name, source, documents, tokens) for name in families},
        texts=installed_texts().digest if any(FAMILIES[name].natural for name in families) else None,
        chat=chat,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        noise_chunk=None if no_noise else noise_chunk,
        compare_by=compare_by,
        ttft_repeats=ttft_repeats,
    )
    made = make_tasks(settings, source)
    to, metric = wide_console(), Metric(compare_by)

    def show(study: Study, found: FamilyResult | TextResult | None) -> None:
        """Show and write a family at once, as a run takes hours; ``None``: all families are finished."""
        if found is not None:
            to.print(family_table(found) if isinstance(found, FamilyResult) else text_table(found))
        if json_path is not None:
            _write(json_path, settings, study, metric, complete=found is None)

    with writing_answers(outcomes_path) as keep:
        study = _measure(settings, made, keep, to, show)
    over = overall(study.results, study.scores, metric) if study.results else []
    if len(study.results) > 1:
        to.print(overall_table(over, len(study.results), metric))
    told: list[FamilyResult | TextResult] = [*study.results, *study.texts]
    for sentence in [*study.skipped, *(note for result in told for note in notes(result))]:
        to.print(sentence, soft_wrap=True)
    show(study, None)
    if plot_path is not None and over:
        from .pareto import panels, plot

        plot(plot_path, panels(study.results, over, metric), title=settings.model)


for _option in main.params:
    if _option.name == "size":  # a random model has no answers to compare
        cast(click.Option, _option).hidden = True


def _measure(
    settings: Settings,
    made: Mapping[str, Sequence[Task]],
    keep: Keep,
    to: Console,
    show: Callable[[Study, FamilyResult | TextResult], None],
) -> Study:
    """Measure all families, and call ``show`` after each family."""
    context = needed_context(settings.engine.model, [task for tasks in made.values() for task in tasks])
    engine = Engine(
        settings.engine, context, hypic=True, enable_prefix_caching=True, logits_processors=[FORCING]
    )
    noise = None
    if settings.noise_chunk is not None:
        noise = noise_engine(settings.engine, context, settings.noise_chunk)
    methods = tuple(dict.fromkeys((FULL, *map(link_method, settings.methods))))
    pairs = [len(tasks) * (len(methods) + (noise is not None)) for tasks in made.values()]
    total = sum(pairs) + len(made) * len(methods) * settings.ttft_repeats
    engines = [e for e in (engine, noise) if e is not None]
    with report.progress(to, total, "starting engines") as steps, running(*engines):
        reasons = refused(engine, methods)
        study = Study(
            engine=engine,
            noise=noise,
            noise_name="" if settings.noise_chunk is None else noise_name(settings.noise_chunk),
            methods=[method for method in methods if method not in reasons],
            chat=settings.chat,
            template=_template(settings),
            ttft_repeats=settings.ttft_repeats,
            steps=steps,
            keep=keep,
            skipped=[f"{m.name} was left out: {reason}." for m, reason in reasons.items()],
        )
        for family, tasks in made.items():
            try:
                found = study.add(family, tasks)
            except (TasksError, PoolError) as e:
                raise click.ClickException(str(e)) from e
            steps.done(len(reasons) * (len(tasks) + settings.ttft_repeats))
            show(study, found)
    return study


def _template(settings: Settings) -> ChatTemplate:
    path = settings.chat_template
    text = None if path is None else path.read_text(encoding="utf-8")
    return ChatTemplate(text, settings.chat_template_kwargs)


def _write(path: Path, settings: Settings, study: Study, metric: Metric, *, complete: bool) -> None:
    results = {
        "complete": complete,
        "families": study.results,
        "texts": study.texts,
        "overall": overall(study.results, study.scores, metric) if study.results else [],
        "skipped": study.skipped,
        "engines": described(*(e for e in (study.engine, study.noise) if e is not None)),
        "intervals": {"percent": 95, "resamples": estimates.RESAMPLES, "seed": estimates.SEED},
    }
    threads = settings.engine.threads
    report.write_json(
        path, report.report("eval", settings, results, threads=threads, module="benchmarks.answers")
    )
