"""The command ``vllm-hypic router``."""

from __future__ import annotations

import logging

import click
import uvicorn

from ...config.router import RecordRoute, RouterConfig
from ...errors import ConfigError
from ..permits import Permits
from ..secret import Secret
from .app import build_app


@click.command("router")
@click.option(
    "--prefill", multiple=True, metavar="URL", help="An instance that computes segments; repeatable."
)
@click.option("--combine", multiple=True, metavar="URL", help="An instance that answers clients; repeatable.")
@click.option("--pool", multiple=True, metavar="URL", help="Both --prefill and --combine; repeatable.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8100, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on."
)
@click.option(
    "--secret-file",
    type=click.Path(),
    help="The instances' segment_parallel.secret_file; by default the secret of this user on this machine.",
)
@click.option(
    "--api-key",
    envvar="VLLM_API_KEY",
    help="The instances' --api-key, for the router's own questions.  [env: VLLM_API_KEY]",
)
@click.option(
    "--deadline-s",
    type=float,
    help="Longest time that a request waits for segments, in seconds.  [default: the instances' own]",
)
@click.option(
    "--min-gain",
    default=RouterConfig.min_gain,
    show_default=True,
    help="Least share of a request's prefill that spreading must save; -1: spread always.",
)
@click.option(
    "--segments-per-worker",
    default=RouterConfig.segments_per_worker,
    show_default=True,
    help="Segment requests open at one worker, 1 to 64.",
)
@click.option(
    "--straggler-factor",
    default=RouterConfig.straggler_factor,
    show_default=True,
    help="Multiple of its predicted time after which a segment also goes to another worker.",
)
@click.option(
    "--straggler-min-s",
    default=RouterConfig.straggler_min_s,
    show_default=True,
    help="Seconds before which no segment counts as late.",
)
@click.option(
    "--through",
    default=RouterConfig.through.value,
    show_default=True,
    type=click.Choice([route.value for route in RecordRoute]),
    help="Route of records where worker and combine node share a tier; other records go directly.",
)
@click.option(
    "--silence-s",
    default=RouterConfig.silence_s,
    show_default=True,
    help="Seconds without events after which the router gives a combine node up.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Least severity that is logged; debug also logs each request.",
)
def router(
    prefill: tuple[str, ...],
    combine: tuple[str, ...],
    pool: tuple[str, ...],
    host: str,
    port: int,
    secret_file: str | None,
    api_key: str | None,
    deadline_s: float | None,
    min_gain: float,
    segments_per_worker: int,
    straggler_factor: float,
    straggler_min_s: float,
    through: str,
    silence_s: float,
    log_level: str,
) -> None:
    """Spread the prefill of cold prompts over many instances.

    The router is an OpenAI-compatible front. All --prefill (or --pool) instances together prefill the
    segments that no instance has cached. The router passes every other request on.
    """
    if pool and (prefill or combine):
        raise click.UsageError("--pool cannot be combined with --prefill or --combine: --pool sets both")
    try:
        settings = RouterConfig(
            prefill=tuple(url.rstrip("/") for url in pool or prefill),
            combine=tuple(url.rstrip("/") for url in pool or combine),
            api_key=api_key,
            deadline_s=deadline_s,
            min_gain=min_gain,
            segments_per_worker=segments_per_worker,
            straggler_factor=straggler_factor,
            straggler_min_s=straggler_min_s,
            through=RecordRoute(through),
            silence_s=silence_s,
        )
        app = build_app(settings, Secret.read(secret_file), Permits.read(secret_file))
    except ConfigError as e:
        raise click.UsageError(str(e)) from e
    logging.basicConfig(
        level=log_level.upper(), format="%(levelname)s %(asctime)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # The router passes on the Date and Server headers of instances, and adds none.
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level=log_level,
        access_log=log_level == "debug",
        date_header=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=10,
    )
