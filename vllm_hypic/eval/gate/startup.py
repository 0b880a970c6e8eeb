"""Reports a model's sign-off when a server starts, refuses the start, or chooses what is signed off.

The process that makes the engine's configuration looks the sign-off up once, before weights are read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.engine import DENSE_CONTEXT, DENSE_ISLANDS, HypicConfig
from ...errors import ConfigError
from ...primitives.policies import parse_link
from .criteria import Limits, Verdict
from .identity import Subject, subject_of, telling
from .signoff import SignOff, SignOffError, default_folder, path_in, read

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.hypic.gate")

LADDER = (
    ("none", "none"),
    ("text", "none"),
    ("text", "query-5"),
    ("text", "query-10"),
    (DENSE_CONTEXT, DENSE_ISLANDS),
    ("text", "query-20"),
    ("text", "query-30"),
)
"""Contexts and islands, the default of dense models included.  The order is by the tokens that a warm prompt
of thousands of tokens computes, fewest first.  A context costs a warm prompt nothing."""


@dataclass(frozen=True)
class Found:
    """A sign-off (``None`` without a valid sign-off), and a sentence about it."""

    sign_off: SignOff | None
    says: str

    @property
    def go(self) -> bool:
        return self.sign_off is not None and self.sign_off.judgement.verdict is Verdict.GO


def look(vllm_config: VllmConfig, config: HypicConfig) -> None:
    """Log the gate's finding in a line, as the options ask.

    Raises :class:`ConfigError` if a go is required but missing.  The function logs nothing for a link method
    without reuse (``full``), and logs in only one of several front-end processes.
    """
    if config.gate.require == "off" or not parse_link(config.link, config.seam_tokens).reuse:
        return
    parallel = vllm_config.parallel_config
    if parallel._api_process_count > 1 and parallel._api_process_rank >= 0:
        return  # the parent process has looked already
    subject = subject_of(vllm_config, config)
    found = find(config.gate.folder, subject)
    if found.go:
        logger.info("hypic gate: %s", found.says)
        return
    way_out = f"run: {command(vllm_config, subject, config)}"
    if config.gate.require == "go":
        raise ConfigError(f"hypic config: gate.require='go': {found.says}; {way_out}")
    logger.warning("hypic gate: %s; %s", found.says, way_out)


def candidates(config: HypicConfig) -> Iterator[HypicConfig]:
    """Yield ``config`` with each pair of context and islands in the ladder."""
    for context, islands in LADDER:
        yield replace(config, context=context, islands=islands)


def cheapest(vllm_config: VllmConfig, config: HypicConfig) -> HypicConfig:
    """Return ``config`` with the cheapest context and islands that are a go, or unchanged if the link method
    reuses nothing.  Raises :class:`ConfigError` if no context and islands are a go."""
    if not parse_link(config.link, config.seam_tokens).reuse:
        return config
    subject = subject_of(vllm_config, config)
    for candidate in candidates(config):
        if find(config.gate.folder, subject.linked(candidate)).go:
            logger.info("hypic gate: chose context %r, islands %r", candidate.context, candidate.islands)
            return candidate
    run = f"{command(vllm_config, subject, config)} --choose"
    raise ConfigError(f"hypic config: gate.choose: no context and islands are signed off as a go; run: {run}")


def find(folder: str | None, subject: Subject) -> Found:
    """Return the sign-off of ``subject`` in ``folder``, or in the default folder (``None``)."""
    try:
        path = path_in(default_folder() if folder is None else Path(folder), subject)
        sign_off = read(path, subject)
    except FileNotFoundError:
        says = f"this model has no sign-off at these settings: {path} does not exist"
        return Found(None, says)
    except SignOffError as e:
        return Found(None, f"the sign-off of this model at these settings is not valid: {e}")
    judgement = sign_off.judgement
    says = f"{judgement.verdict}, signed off {sign_off.time}"
    if sign_off.by is not None:
        says += f" by {sign_off.by}"
    usual = dataclasses.asdict(Limits())
    own = [f"{name} {limit:g}" for name, limit in sign_off.limits.items() if usual.get(name) != limit]
    if own:
        says += f", with non-default limits ({', '.join(own)})"
    if against := judgement.against:
        says += f": {'; '.join(reason.says for reason in against)}"
    return Found(sign_off, f"{says} ({path})")


def command(vllm_config: VllmConfig, subject: Subject, config: HypicConfig) -> str:
    """Return the command line that judges ``subject``."""
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    words = ["vllm-hypic", "gate", model.model, "--dtype", subject.dtype]
    usual = HypicConfig(link=config.link).for_model(model)
    # The subject's own options leave out a context that is the model's default but turned off here.
    ours = {**telling(usual), **subject.options}
    given, expected = config.to_mapping(), {**usual.to_mapping(), "link": HypicConfig().link}
    if options := {n: given[n] for n in ours if ours[n] is not None and given[n] != expected[n]}:
        words += ["--hypic", json.dumps(options)]
    engine: dict[str, Any] = {}
    if subject.quantization is not None:
        engine["quantization"] = subject.quantization
    if subject.kv_dtype != subject.dtype:
        engine["kv_cache_dtype"] = subject.kv_dtype
    overrides = json.loads(subject.overrides)
    if overrides and isinstance(overrides, dict):  # a function has no form on a command line
        engine["hf_overrides"] = overrides
    if subject.state_dtype != "auto":
        engine["mamba_ssm_cache_dtype"] = subject.state_dtype
    # The digest of the weights depends on all that follows.
    if load_format != "auto":
        engine["load_format"] = load_format
    if model.revision is not None:
        engine["revision"] = model.revision
    if model.trust_remote_code:
        engine["trust_remote_code"] = True
    if engine:
        words += ["--engine-args", json.dumps(engine)]
    if config.gate.folder is not None:
        words += ["--folder", config.gate.folder]
    return shlex.join(words)
