"""Which kinds of speculative decoding an engine with the plugin runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LOOKED_UP = ("ngram", "suffix")
"""Methods of vLLM whose drafts are looked up in a request's own tokens, without a model."""
BY_A_HEAD = ("eagle", "eagle3", "mtp")
"""Methods of vLLM whose drafts are those of layers that read the model's hidden states."""
PREDICTORS = ("Qwen3_5MTP", "Qwen3_5MoeMTP", "Qwen3NextMTP")
"""Heads that come with a model's own weights (multi-token prediction), as vLLM calls their classes."""
DRAFTED_FOR = {
    "FalconH1ForCausalLM": ("draft_model", "eagle"),
    "Qwen3_5ForCausalLM": ("draft_model",),
}
"""Models with linear layers, and what was run beside them and is right."""
OF_ITS_OWN = ("draft_model", "eagle", "eagle3")
BY_A_MODEL = ("draft_model", *BY_A_HEAD)
"""Methods of vLLM whose drafts are those of a model that reads records, too."""


def looks_drafts_up(config: VllmConfig) -> bool:
    """Whether this engine's drafts are looked up in the prompts' tokens."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method in LOOKED_UP


def drafts_by_a_head(config: VllmConfig) -> bool:
    """Whether what drafts reads with each token its successor."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method in BY_A_HEAD


def see_text_alike(config: VllmConfig) -> None:
    """Give a head that comes with a model of text the positions of that model: of M-RoPE in a configuration
    vLLM 0.32 forgets what is for images, but not for the head."""
    speculative, model = config.speculative_config, config.model_config
    if speculative is None or speculative.method != "mtp" or model.uses_mrope:
        return
    drafting = speculative.draft_model_config
    for fields in (drafting.hf_config, drafting.hf_text_config):
        for name in ("mrope_section", "mrope_interleaved"):
            (getattr(fields, "rope_parameters", None) or {}).pop(name, None)


def refusal(config: VllmConfig, *, keeps_states: bool = False, on_cpu: bool = True) -> str | None:
    """Why the speculative decoding that an engine's complete configuration asks for is not served, or
    ``None``: it is, or none is asked for.  ``keeps_states``: linear layers of this model keep the states
    behind each draft."""
    speculative, model = config.speculative_config, config.model_config
    if speculative is None:
        return None
    if (stages := config.parallel_config.pipeline_parallel_size) > 1:
        return (
            f"speculative decoding with pipeline_parallel_size={stages}: vLLM's V1 model runner loads the "
            "drafter on the last stage alone, and the other stages do not start; drop one of the two options"
        )
    if speculative.method not in LOOKED_UP + BY_A_MODEL:
        return (
            f"speculative decoding by {speculative.method!r} is not tested with records: "
            f"expected one of {', '.join(LOOKED_UP + BY_A_MODEL)}"
        )
    if speculative.method in BY_A_MODEL and (reason := _refusal_of_model(config)) is not None:
        return f"speculative decoding by {speculative.method!r}: {reason}"
    if (model.is_hybrid and not keeps_states) or model.is_attention_free:
        return (
            f"speculative decoding of {model.architecture} is not supported: among linear layers, only gated "
            "delta nets, Mamba2 and short convolutions beside attention keep the state behind each draft; "
            "drop --speculative-config"
        )
    tried = DRAFTED_FOR.get(model.architecture, ())
    if model.is_hybrid and speculative.method in OF_ITS_OWN and speculative.method not in tried:
        others = "; ".join(f"{name}: {', '.join(methods)}" for name, methods in DRAFTED_FOR.items())
        return (
            f"speculative decoding by {speculative.method!r} of {model.architecture} is not tested: expected "
            f"one of {', '.join((*LOOKED_UP, 'mtp', *tried))} (with linear layers, "
            f"other methods are tested only for {others})"
        )
    if model.use_mla and on_cpu:
        return (
            f"speculative decoding of {model.architecture} is not supported: vLLM's latent attention gives "
            "wrong answers on CPUs when a request has several tokens; drop --speculative-config"
        )
    return None


def _refusal_of_model(config: VllmConfig) -> str | None:
    """Why what drafts cannot take part in composition, or ``None``."""
    speculative, model = config.speculative_config, config.model_config
    assert speculative is not None
    drafting = speculative.draft_model_config
    if speculative.parallel_drafting:
        return "parallel_drafting is not supported, as its rows stand for no token; drop the option"
    if speculative.disable_padded_drafter_batch:
        return "disable_padded_drafter_batch is not supported, as the batch lacks rows; drop the option"
    if speculative.method == "mtp" and drafting.architecture not in PREDICTORS:
        return f"the head {drafting.architecture} is not tested: expected one of {', '.join(PREDICTORS)}"
    of_both = {model.uses_mrope, drafting.uses_mrope}
    if of_both != {False} and not (of_both == {True} and speculative.method in BY_A_HEAD):
        return "M-RoPE is not supported, unless the model and its head (eagle, eagle3, mtp) both use M-RoPE"
    if drafting.is_hybrid or drafting.is_attention_free or drafting.use_mla:
        return f"{drafting.architecture} is not supported: expected a draft model with full attention alone"
    if drafting.max_model_len < model.max_model_len:
        return (
            f"the draft model {drafting.model} has max_model_len={drafting.max_model_len}: expected "
            f"{model.max_model_len} or more"
        )
    return None
