"""The families: how a tiny model of each is saved, what its oracle is, and how near the engine must come.

A row of :data:`FAMILIES` is all that a family's tests need.  :data:`LAYERS` has models of one layer, some of
architectures that have no oracle of their own.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine import tiny_models, tiny_vision
from engine.test_vision_text import EXPERTS as MOE
from engine.test_vision_text import MROPE
from lib.oracle import Oracle, fla, kimi_models, mamba_oracle, models, ring_models, save_mamba1_model
from lib.oracle.delta import DeltaInputs
from lib.oracle.faults import SOFT_CAP_FAULTS, WINDOW_FAULTS
from lib.oracle.fla_models import save_fla_model
from lib.oracle.gemma2 import Gemma2Oracle
from lib.oracle.kimi import KimiDeltaOracle
from lib.oracle.mamba_models import EXPERTS
from lib.oracle.mamba_models import MAMBA2 as MAMBA2_MODELS
from lib.oracle.mamba_models import save_mamba_model as save_mamba2_model
from lib.oracle.masked import MaskedOracle
from lib.oracle.mla import MLAOracle
from lib.oracle.olmo import OlmoOracle, save_olmo_model
from lib.oracle.short_conv import ShortConvOracle

from vllm_hypic.patches import (
    cpu_bailing_recurrence,
    cpu_kimi_recurrence,
    cpu_mamba1,
    cpu_mamba2_checkpoints,
    cpu_olmo_recurrence,
    cpu_rope_heads,
)

from . import own
from .contract import METHODS, SEAMS
from .rows import BF16, CHUNKS, F32, FULL, LINEAR, SLIDING, WHOLE, Case, LayerCase, Life, families, layers

NO_PREFIX: dict[str, Any] = {"enable_prefix_caching": False}
CPU_MLA = {"attention_backend": "CPU_MLA"}
"""What a stock engine needs in other dtypes than bfloat16 where the CPU has AMX."""
AMX = torch.cpu._is_amx_tile_supported()
STOCK_LATENT: dict[str, dict[str, Any]] = {F32: CPU_MLA | NO_PREFIX, BF16: {} if AMX else NO_PREFIX}
"""A stock engine does not start with a prefix cache that vLLM then switches off: in float32, without AMX."""
ROPE_OPS = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
"""Without it eager engines of vLLM 0.32 rotate Q and K wrongly; see ``patches/cpu_rope_heads.py``."""
STOCK_ROPE = {F32: ROPE_OPS, BF16: ROPE_OPS}
STOCK_LATENT_ROPE = {dtype: ROPE_OPS | given for dtype, given in STOCK_LATENT.items()}

BOTH = (F32, BF16)
ALL = ((F32, CHUNKS), (F32, WHOLE), (BF16, WHOLE), (BF16, CHUNKS))
LATENT = ((F32, WHOLE), (BF16, WHOLE), (BF16, CHUNKS))
"""vLLM's latent attention takes prompts whole in float32 and has no prefix cache there; in bfloat16 prompts
come in chunks where the CPU has AMX."""
ROUTES = {"cases": LATENT[:1]}
"""Experts: bfloat16 routes to others than the float64 oracle, in ordinary requests, too."""

FIRST: dict[str, Any] = {"fast": True, "compared": {F32: True, BF16: False}, "life": Life(24)}
"""It shows its kind in ``make test``, beside a stock engine ..."""
ALIKE = FIRST | {"compared": {F32: False, BF16: False}}
"""... or without one, where plain requests take the same code as another's."""
NO_T = {F32: {"no_T": 100.0}}
"""Answers show that transitions are applied."""
ROUNDED_NO_T = NO_T | {BF16: {"no_T": 2.0, "no_public_kv": 2.0}}
NO_NAIVE = tuple(name for name in METHODS if name != "naive")
"""Which leaves out a transition; there is none."""
NO_LATENT_PREFIX = {"second turn": "vLLM's latent attention has no prefix cache in float32"}

# -- the gated delta net, which stock vLLM does not run in float32 ---------------------------------------

ELSEWHERE = "tests/engine has it: test_oracle_agreement, test_contexts_and_islands, test_turns"
GATED_DELTA = families(
    {"oracle": Oracle, "bound": float("nan"), "cases": ALL[3:], "texts": 3, "kl": True},
    {
        "gated-delta": {
            # Untied: with tied embeddings a random model only repeats its last token.
            **{"save": partial(models.save_hybrid_model, tie=False), "planted": {BF16: {"no_T": 1.2}}},
            "without": dict.fromkeys(("link methods", "islands", "second turn", "faults"), ELSEWHERE),
            **{"fast": True, "compared": {BF16: True}},
        }
    },
)

# -- Mamba2 and Mamba1 -----------------------------------------------------------------------------------

HEADS = {"mamba_num_heads": 32, "mamba_head_dim": 16}
"""What no vector holds of a batch's steps goes through scalar code in stock vLLM, with other last bits."""
MAMBA = {"oracle": mamba_oracle, "bound": 3e-5, "cases": ALL[:3], "planted": NO_T}
"""Measured: below 1e-5."""
ZAMBA2 = {"bound": 2e-3}
"""Measured: 4e-4, where ordinary requests are 1.4e-4 away from the oracle."""
NEMOTRON = partial(save_mamba2_model, name="NemotronH", **HEADS)
MAMBA2 = families(
    MAMBA | {"mended": cpu_mamba2_checkpoints.apply},
    {
        "mamba2": FIRST
        | {"save": NEMOTRON, "prefix": BOTH}
        | {"own": (own.transitions_are_the_records, own.rows_apart_have_stock_bits)},
        **{
            name: {"save": partial(save_mamba2_model, name=name)} | (ZAMBA2 if name == "Zamba2" else {})
            for name in MAMBA2_MODELS
        },
    },
)
JAMBA = partial(save_mamba1_model, name="Jamba")
MAMBA1 = families(
    MAMBA | {"mended": cpu_mamba1.apply, "own": (own.transitions_are_the_records,)},
    {
        "mamba1": FIRST | {"save": JAMBA, "prefix": BOTH},
        "mamba1-experts": {"save": partial(JAMBA, **EXPERTS, seed=3)},
        # Without attention: requests are composed from states alone.
        "mamba1-alone": ALIKE
        | {"save": partial(save_mamba1_model, name="Mamba"), "prefix": BOTH, "life": Life(grows=False)},
        "FalconMamba": {"save": partial(save_mamba1_model, name="FalconMamba")},
    },
)

# -- flash-linear-attention ------------------------------------------------------------------------------


def save_fla(path: Path, name: str, **fields: Any) -> Path:
    return save_fla_model(path, **{"dtype": torch.float32} | fla.MODELS[name] | fields)


def fla_row(name: str) -> dict[str, Any]:
    """In float32 DeltaNet's transitions keep their norm, as nothing decays, so that their rounding to fp16
    shows, 4e-4; the others are exact, 1e-5, as are ordinary requests."""
    row: dict[str, Any] = {"save": partial(save_fla, name=name), "oracle": partial(fla.fla_oracle, name=name)}
    row["bound"] = 1e-3 if name.startswith("delta-net") else 1e-4
    if fla.MODELS[name].get("group", 2) is None:
        row["planted"] = NO_T | {BF16: {"no_T": 2.0}}
    return row


FLA_FIRST = {"prefix": (BF16,)}
FLA = families(
    {"cases": ALL, "planted": ROUNDED_NO_T, "ordinary": 1e-4, "rounded": 1e-4, "noise": 0.8},
    {name: fla_row(name) for name in fla.MODELS}
    | {name: fla_row(name) | FIRST | FLA_FIRST for name in ("delta-net", "gla")}
    | {"retnet": fla_row("retnet") | ALIKE | FLA_FIRST}
    | {"delta-net-alone": fla_row("delta-net-alone") | {"life": Life(grows=False)}},
)

# -- OLMo-Hybrid -----------------------------------------------------------------------------------------


class SmallBeta(OlmoOracle):
    """As the gated delta net has it: up to 1, not up to 2."""

    def _delta_inputs(self, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> DeltaInputs:
        return super()._delta_inputs(qkv, g, beta / 2)


SAVE_OLMO = partial(save_olmo_model, layer_types=[LINEAR, FULL] * 2)
OLMO = families(
    # Measured: below 1.3e-4, ordinary requests 1e-4.
    {"oracle": OlmoOracle, "bound": 5e-4, "others": (SmallBeta,), "planted": NO_T, "prefix": BOTH}
    | {"mended": cpu_olmo_recurrence.apply},
    {
        "olmo": FIRST | {"save": partial(SAVE_OLMO, rope_theta=10000.0), "cases": ALL[:3]},
        "olmo-nope": {"save": partial(SAVE_OLMO, rope_theta=None), "cases": ALL[:2]},
    },
)

# -- Kimi delta attention: Kimi-Linear and Bailing V3 ----------------------------------------------------


class OneGateAHead(KimiDeltaOracle):
    """As the gated delta net has it: the mean over channels."""

    def _log_decays(self, name: str, a: torch.Tensor) -> torch.Tensor:
        g = super()._log_decays(name, a)
        return g.mean(-1, keepdim=True).expand_as(g)


def kimi_row(name: str) -> dict[str, Any]:
    """Bounded gates of these weights hardly decay, so T keeps its norm, and its rounding to fp16 shows: 5e-4.
    Ordinary requests measured 1e-5, islands 4e-5, composed ones 4e-5 from the oracle that rounds T."""
    save = partial(kimi_models.save_delta_model, name=name, pairs=2)
    bounded = name in ("bounded-gates", "bailing", "bailing-experts")
    row = {"save": save, "oracle": partial(kimi_models.delta_oracle, name=name)}
    return row | {"bound": 1e-3 if bounded else 1e-4, "cases": LATENT}


KIMI = families(
    {"planted": ROUNDED_NO_T, "ordinary": 1e-4, "rounded": 1e-4, "noise": 0.5, "others": (OneGateAHead,)}
    | {"without": NO_LATENT_PREFIX, "mended": cpu_kimi_recurrence.apply, "stock": STOCK_LATENT_ROPE},
    {
        "kimi": kimi_row("dense") | FIRST,
        "kimi-bounded-gates": kimi_row("bounded-gates"),
        "kimi-experts": kimi_row("experts") | ROUTES,
        "bailing": kimi_row("bailing") | ALIKE,
        "bailing-unbounded": kimi_row("bailing-unbounded"),
        "bailing-experts": kimi_row("bailing-experts") | ROUTES,
    },
)

# -- lightning attention: Ring and Ling 2.5, Ring-linear 2.0 ---------------------------------------------


def ring_row(name: str, **fields: Any) -> dict[str, Any]:
    save = partial(ring_models.save, name=name, **fields)
    return {"save": save, "oracle": partial(ring_models.oracle, name=name)}


def mend_ring() -> None:
    """Without the second patch attention would rotate wrongly; with :data:`ROPE_OPS` instead, linear layers
    would rotate by other code than ours, with other last bits."""
    cpu_bailing_recurrence.apply()
    cpu_rope_heads.apply()


FAR: dict[str, Any] = {"max_positions": 1 << 17}
RING = {
    **{"bound": 1e-4, "noise": 0.5},  # measured: below 1e-5, as ordinary requests
    "planted": ROUNDED_NO_T | {F32: {"no_T": 100.0, "states_not_moved": 100.0}},
    "mended": mend_ring,
}
POSITIONS = {"own": (own.states_at_any_position,)}
LIGHTNING = families(
    RING | {"cases": LATENT, "stock": STOCK_LATENT, "without": NO_LATENT_PREFIX, "args": {F32: NO_PREFIX}},
    {
        "lightning": ring_row("dense", **FAR) | FIRST | POSITIONS | {"prefix": (BF16,) if AMX else ()},
        "lightning-experts": ring_row("experts") | ROUTES,
        "lightning-silu": ring_row("silu"),
        "lightning-yarn": ring_row("yarn"),
    },
)
RING_LINEAR = families(
    RING | {"cases": (ALL[0], *ALL[2:])},
    {
        "ring-linear": ring_row("ring-linear-dense", **FAR) | ALIKE | POSITIONS | {"prefix": (BF16,)},
        "ring-linear-experts": ring_row("ring-linear-experts") | {"cases": ALL[:1]},
    },
)

# -- short convolutions: LFM2 ----------------------------------------------------------------------------

SAVE_LFM2 = partial(models.save_short_conv_model, layer_types=["conv", "conv", FULL, "conv", FULL])
SHORT_CONV = families(
    {"oracle": ShortConvOracle, "bound": 1e-4, "cases": ALL[:3]},  # measured: below 2e-5
    {
        "short-convolutions": FIRST
        | {"save": SAVE_LFM2, "stock": STOCK_ROPE, "methods": NO_NAIVE}
        | {"planted": {F32: {"no_conv_tail": 30}}, "seen": {F32: 30}, "islands_seen": 30}
        | {"own": (own.tails_are_the_records, own.naive_is_refused), "life": Life(24)}
    },
)

# -- latent attention: DeepSeek-V2 -----------------------------------------------------------------------

TURNING = ("rotated_twice", "not_rotated", "wrong_rotation", "no_public_kv")
SAVE_MLA = models.save_mla_model
MLA = families(
    {"oracle": MLAOracle, "bound": 1e-4, "noise": 0.3}  # measured: below 4e-5, as ordinary requests
    | {"planted": {F32: dict.fromkeys(TURNING, 200.0), BF16: dict.fromkeys(TURNING, 4.0)}}
    | {"seen": {F32: 200}, "context_seen": 200, "islands_seen": 200, "methods": NO_NAIVE}
    | {"own": (own.latents_at_any_position, own.longer_questions_go_on)}
    | {"without": NO_LATENT_PREFIX, "stock": STOCK_LATENT_ROPE},
    {
        # Blocks of 16 tokens, and not of 128.
        "latents": FIRST
        | {"save": partial(SAVE_MLA, yarn=True, q_lora=True), "cases": LATENT, "life": Life(blocks=256)},
        "latents-dense": {"save": SAVE_MLA, "cases": LATENT[:1]},
        "latents-experts": {"save": partial(SAVE_MLA, experts=True, q_lora=True)} | ROUTES,
    },
)

# -- attention with windows, soft-caps and shared KV -----------------------------------------------------

ATTENTION = {"bound": 2e-3, "texts": 3, "generated": 60, "methods": SEAMS}
"""Of checkpoints in bfloat16; blocks before windows have been given away when so much was generated."""
NO_STATES = {"second turn": "attention alone: its blocks are those of every model"}
NO_ISLANDS = NO_STATES | {"islands": "those of windows are the same, and the oracle of shared KV has none"}
SAVE_WINDOWS = models.save_windowed_model
WINDOWS = families(
    ATTENTION
    | {"oracle": Oracle, "kl": True, "cases": (ALL[0], *ALL[2:]), "methods": (*SEAMS, "behind-a-text")}
    | {"planted": {F32: dict.fromkeys(WINDOW_FAULTS, 100.0), BF16: dict.fromkeys(WINDOW_FAULTS, 1.2)}}
    | {"seen": {F32: 100, BF16: 1.2}, "faults": (*WINDOW_FAULTS, "wrong_rotation"), "without": NO_STATES}
    | {"own": (own.islands_behind_a_text, own.a_window_is_what_stock_says)},
    {
        "windows": FIRST
        | {"save": partial(SAVE_WINDOWS, window=40, layer_types=[SLIDING, FULL, SLIDING]), "life": Life(30)},
        "windows-everywhere": {"save": partial(SAVE_WINDOWS, window=24, layer_types=[SLIDING] * 3)}
        | {
            "without": NO_STATES
            | {"islands": "the last token of a prompt sees none through three windows of 24"}
        },
    },
)
CAPPED = {"window": 40, "layer_types": [SLIDING, FULL] * 2}
SOFT_CAPS = families(
    ATTENTION | {"oracle": Gemma2Oracle, "cases": (ALL[0], (BF16, 256)), "without": NO_ISLANDS},
    {
        "soft-caps": {"save": partial(models.save_soft_capped_model, **CAPPED), "fast": True}
        | {"planted": {F32: dict.fromkeys(SOFT_CAP_FAULTS, 100.0)}, "compared": {BF16: False}}
        | {"seen": {F32: 100, BF16: 10}, "faults": (*SOFT_CAP_FAULTS, *WINDOW_FAULTS)}
    },
)
SHARED_FAULTS = ("readers_without_public", "wrong_rotation", "stream_positions", "early_visibility")
SHARED_KV = families(
    ATTENTION
    | {"cases": (ALL[0], (BF16, 256)), "without": NO_ISLANDS, "compared": {BF16: False}}
    | {"planted": {F32: {"readers_without_public": 100.0}}, "faults": (*SHARED_FAULTS, *WINDOW_FAULTS)}
    # Bfloat16 tells the smallest fault by little.
    | {"seen": {F32: 100, BF16: 1.1}, "own": (own.records_hold_what_layers_own,)},
    {
        "shared-kv": {"save": partial(models.save_shared_kv_model, name="Gemma3nText", window=40)}
        | {"oracle": partial(MaskedOracle, by_embeddings=True), "fast": True, "life": Life(30)},
        "shared-kv-gemma4": {"save": partial(models.save_shared_kv_model, name="Gemma4Text", window=40)}
        | {"oracle": MaskedOracle},
    },
)

LINEAR_KINDS = (GATED_DELTA, MAMBA2, MAMBA1, FLA, OLMO, KIMI, LIGHTNING, RING_LINEAR, SHORT_CONV)
KINDS = (*LINEAR_KINDS, MLA, WINDOWS, SOFT_CAPS, SHARED_KV)
FAMILIES = {family.name: family for kind in KINDS for family in kind}
CASES = [Case(family, *case) for family in FAMILIES.values() for case in family.cases]
LIVES = {name: family for name, family in FAMILIES.items() if family.life}
"""One of each kind."""

# -- models of one layer ---------------------------------------------------------------------------------


def heads(keys: int, values: int, size: int) -> dict[str, Any]:
    given = {"num_key_heads": keys, "num_value_heads": values, "key_head_dim": size, "value_head_dim": size}
    return {f"linear_{name}": number for name, number in given.items()}


def qwen(name: str, *fields: dict[str, Any], kinds: tuple[str, ...] = (LINEAR, FULL)) -> Callable[..., Any]:
    given: dict[str, Any] = {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}
    for more in fields:
        given |= more
    quiet: dict[str, Any] = {"norm_center": 0.0, "silent": ("layers.1.self_attn.o_proj",)}
    if name == "Qwen3_5":  # a vision-language model asked about text: positions [3, tokens]
        return partial(tiny_vision.save_vision, name=name, text=given, **quiet)
    return tiny(name, given, dtype=torch.bfloat16, **quiet)


def tiny(name: str, fields: dict[str, Any], **more: Any) -> Callable[..., Any]:
    return partial(tiny_models.save, name=name, fields=fields, **more)


PAIR: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}
FOUR_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 32}
GRANITE_EXPERTS = MAMBA2_MODELS["GraniteMoeHybrid"] | PAIR | FOUR_EXPERTS | {"num_local_experts": 4}
LFM2_EXPERTS = FOUR_EXPERTS | {"num_experts": 4, "moe_intermediate_size": 64}
LFM2_EXPERTS |= {"num_hidden_layers": 2, "layer_types": ["conv", FULL], "num_dense_layers": 1}
BOUNDS = {F32: 5e-5, BF16: 0.1}
SMALL_STEPS = {F32: 2e-5, BF16: 0.05}
"""Of Mamba's models, whose logprobs have a standard deviation of 2.5; others' have 2.6."""
WITHOUT_PREFIX = {"args": {F32: NO_PREFIX, BF16: NO_PREFIX}}
COMPILED = {"compiled": (F32,)} | WITHOUT_PREFIX
MAMBA_SEEN = {"seen": {F32: 500.0, BF16: 3.0}} | WITHOUT_PREFIX
QUIET = ("self_attn.o_proj",)
ONE_MAMBA2 = partial(save_mamba2_model, num_hidden_layers=1)
SAVE_FLA = partial(save_fla, layers=2, silent=True)
KIMI_LAYER = {"mended": cpu_kimi_recurrence.apply, "stock": STOCK_LATENT, "bounds": BOUNDS}
SAVE_KIMI = partial(kimi_models.save_delta_model, pairs=1, silent=True)
RING_LAYER = {"mended": cpu_bailing_recurrence.apply, "bounds": BOUNDS} | COMPILED
SAVE_RING = partial(ring_models.save, layers=2, silent=True, **FAR)
LAYERS = [
    *layers(
        # Measured: below 0.08, and above 2.3 when T is left out.
        {"bounds": {BF16: 0.15}, "seams": (3, 8, 20)} | WITHOUT_PREFIX,
        {
            "qwen3-next-64-grouped": qwen("Qwen3Next", heads(2, 4, 64), MOE),
            "qwen3-next-128-grouped": qwen("Qwen3Next", heads(1, 4, 128), MOE, {"mlp_only_layers": [0]}),
            "qwen3.5-moe-64": qwen("Qwen3_5MoeText", heads(2, 2, 64), MOE),
            "qwen3.5-vision": qwen("Qwen3_5", heads(2, 4, 64), {"rope_parameters": MROPE}),
            "qwen3.5-moe-128-grouped": qwen("Qwen3_5MoeText", heads(2, 4, 128), MOE),
            # Records of linear layers alone are states: there are no pages to wait for.
            "qwen3-next-alone": qwen("Qwen3Next", heads(2, 4, 64), MOE, kinds=(LINEAR,)),
        },
    ),
    *layers(
        {"bounds": SMALL_STEPS, "compiled": (F32,), "states": BF16} | MAMBA_SEEN,
        {"mamba2": partial(NEMOTRON, layers_block_type=[LINEAR, FULL], silent=("layers.1.mixer.o_proj",))},
    ),
    *layers(
        {"bounds": {F32: SMALL_STEPS[F32]}} | MAMBA_SEEN,
        {
            "mamba2-granite": partial(save_mamba2_model, name="GraniteMoeHybrid", **PAIR, silent=QUIET),
            "mamba2-granite-experts": tiny("GraniteMoeHybrid", GRANITE_EXPERTS, silent=QUIET),
            "mamba2-falcon-h1": partial(ONE_MAMBA2, name="FalconH1", silent=QUIET),
            "mamba2-zamba2": partial(
                ONE_MAMBA2, name="Zamba2", layers_block_type=["hybrid"], silent=("layers.0.linear.",)
            ),
            "mamba2-alone": partial(ONE_MAMBA2, name="Mamba2"),
        },
    ),
    *layers(
        {"bounds": SMALL_STEPS, "mended": cpu_mamba1.apply, "states": "auto", "compiled": (F32,)}
        | MAMBA_SEEN,
        {"mamba1": partial(JAMBA, num_hidden_layers=2, silent=("o_proj",))},
    ),
    *layers({"bounds": BOUNDS | {F32: 1e-3}} | COMPILED, {"delta-net": partial(SAVE_FLA, name="delta-net")}),
    *layers(
        {"bounds": BOUNDS | {F32: 1e-4}} | COMPILED,
        {name: partial(SAVE_FLA, name=name) for name in ("gla", "retnet")},
    ),
    *layers(
        {"bounds": BOUNDS, "mended": cpu_olmo_recurrence.apply, "states": "auto"} | COMPILED,
        {"olmo": partial(save_olmo_model, layer_types=[LINEAR, FULL], silent=True)},
    ),
    *layers(KIMI_LAYER, {"kimi": partial(SAVE_KIMI, name="dense")}),
    *layers(
        KIMI_LAYER | {"compiled": BOTH}, {"bailing-unbounded": partial(SAVE_KIMI, name="bailing-unbounded")}
    ),
    *layers(RING_LAYER | {"stock": {F32: CPU_MLA}}, {"lightning": partial(SAVE_RING, name="dense")}),
    *layers(RING_LAYER, {"ring-linear": partial(SAVE_RING, name="ring-linear-dense")}),
    *layers(
        {"bounds": {F32: 1e-4, BF16: 0.15}, "seen": None, "seams": (2, 20)} | COMPILED,
        {"short-convolutions": partial(models.save_short_conv_model, layer_types=["conv", FULL])},
    ),
    *layers(
        {"bounds": {F32: 1e-4}, "seen": None, "seams": (2, 20)} | WITHOUT_PREFIX,
        {"lfm2-experts": tiny("Lfm2Moe", LFM2_EXPERTS)},
    ),
    # Nothing in a latent depends on what stands before its token: records are exact at any place.
    *layers(
        {"bounds": {F32: 1e-4}, "seen": None, "seams": (0,)},
        {name: tiny(name, own.ONE_MLA_LAYER) for name in ("DeepseekV3", "Glm4MoeLite")},
    ),
]
LAYER_CASES = [LayerCase(layer, dtype) for layer in LAYERS for dtype in layer.bounds]
