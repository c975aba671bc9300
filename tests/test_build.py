"""The one place that calls a `_target_`: what is allowed, what is passed, what is refused."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from jobs import composed
from ranks import train
from torch import nn

from meshwork import build
from meshwork.config import ConfigError
from meshwork.data import Splits


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("torch.nn.CrossEntropyLoss", nn.CrossEntropyLoss),
        ("torch.optim.AdamW", torch.optim.AdamW),
        ("torch.nn.functional.cross_entropy", nn.functional.cross_entropy),
        ("meshwork.optim.cosine", __import__("meshwork.optim").optim.cosine),
    ],
)
def test_what_an_allowed_package_defines_is_found(target: str, found: object) -> None:
    assert build.resolve(target, "model._target_") is found


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.run",
        "builtins.eval",
        "torch.load",
        "torch.hub.load",
        "torchnn.Linear",
        "timm",
        "timm.data.os.system",
        "meshwork.rundir.os.system",
        "timm.data.loader.torch.load",
        "timm.models._hub.hf_hub_download",
        "meshwork.rundir.shutil.rmtree",
        "meshwork.rundir.json.loads",
        "meshwork.build.get_object",
        "torch.nn.functional.importlib.import_module",
        "timm.create_model.__globals__.get",
        "timm.create_model.__class__",
        "torch.nn.Linear.__subclasses__",
        "torch.nn.modules.module.functools.partial",
        "timm.models",
        "timm.__version__",
        "torchvision.datasets.folder.IMG_EXTENSIONS",
    ],
)
def test_what_is_from_elsewhere_or_not_callable_is_refused(target: str) -> None:
    """Also by a path that leads through an allowed package."""
    with pytest.raises(ConfigError) as error:
        build.resolve(target, "task._target_")
    assert f"task._target_={target}" in str(error.value)


def test_an_unfamiliar_package_is_not_even_imported(tmp_path: Path) -> None:
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(ConfigError, match=r"ALLOWED in meshwork/build\.py"):
            build.resolve("stranger.run", "model._target_")
    finally:
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torch.nn.Lniear", "No module named 'torch.nn.Lniear'"),
        ("timm.nothing.here", "'nothing' is importable from module 'timm'"),
        ("torch.nn.", "Relative imports are not supported"),
        ("timm..x", "Relative imports are not supported"),
    ],
)
def test_what_is_not_there_is_said(target: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"model\._target_=.* is not to be found") as error:
        build.resolve(target, "model._target_")
    assert said in str(error.value)


def test_one_list_lets_a_package_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ours")
    exec("def model(): return 3", module.__dict__)
    monkeypatch.setitem(sys.modules, "ours", module)
    with pytest.raises(ConfigError, match="not from an allowed package"):
        build.resolve("ours.model", "model._target_")
    monkeypatch.setattr(build, "ALLOWED", (*build.ALLOWED, "ours"))
    assert build.resolve("ours.model", "model._target_")() == 3


# ---- calling -------------------------------------------------------------------------------------

LINEAR = "torch.nn.Linear"


def test_args_win_and_of_ours_only_what_is_named_is_passed() -> None:
    offered = {"in_features": 2, "out_features": 3, "pretrained": True}
    layer = build.call(LINEAR, {"out_features": 5}, offered, "model")
    assert (layer.in_features, layer.out_features) == (2, 5)


def test_targets_inside_args_are_built_first_in_dicts_and_lists() -> None:
    inner = {"_target_": LINEAR, "in_features": 1, "out_features": 2}
    found = build.nested({"a": [inner, 3], "b": {"c": inner}, "d": (inner,)}, "task.args")
    assert isinstance(found["a"][0], nn.Linear) and found["a"][1] == 3
    assert isinstance(found["b"]["c"], nn.Linear) and isinstance(found["d"][0], nn.Linear)
    with pytest.raises(ConfigError, match=r"task\.args\.b\._target_=os\.system"):
        build.nested({"b": {"_target_": "os.system"}}, "task.args")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"in_feature": 2}, "model.args.in_feature: torch.nn.Linear takes no such argument; did"),
        ({"zzz": 2}, "it takes in_features, out_features, bias, device, dtype"),
        ({"in_features": 2}, "missing a required argument: 'out_features'"),
    ],
)
def test_arguments_that_do_not_fit_are_said(args: dict, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        build.call(LINEAR, args, {}, "model")
    assert said in str(error.value)


def test_a_type_error_inside_a_target_is_not_taken_for_a_wrong_argument() -> None:
    with pytest.raises(TypeError):
        build.call(LINEAR, {"in_features": "two", "out_features": 1}, {}, "model")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("task.criterion={margin: 1}", "task.criterion has no _target_"),
        ("task.criterion={_target_: torch.nn.MSELoss, reductoin: sum}", "did you mean reduction?"),
        ("task.criterion={_target_: os.system}", "task.criterion._target_=os.system"),
    ],
)
def test_a_criterion_that_cannot_be_built_is_said(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        build.build_task(composed(line), Splits(classes=("a", "b")))
    assert said in str(error.value)


def test_a_criterion_is_asked_for_a_value_a_sample() -> None:
    task = build.build_task(composed("task.criterion={_target_: torch.nn.MSELoss}"), Splits())
    assert task.criterion.reduction == "none"


def test_a_code_path_from_the_command_line_is_refused_without_running(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    given = ["model._target_=meshwork.rundir.os.system", f"model.args={{command: touch {marker}}}"]
    ended = train(1, *given, cwd=tmp_path)
    assert ended.codes == [2] and not marker.exists()
    assert (
        "model._target_=meshwork.rundir.os.system is not from an allowed package" in ended.all_err
    )
