"""Given weights are loaded whole or refused, never partly or at random; frozen ones stay."""

from pathlib import Path

import pytest
import timm
import torch
from jobs import composed, job_of, joined, steps
from ranks import train
from safetensors.torch import save_file
from torch import nn

from meshwork import build
from meshwork.config import ConfigError
from meshwork.models.weights import freeze, load_weights

TINY = ("model.args={patch_size: 8, depth: 2}",)


def vit(num_classes: int = 10, **args: object) -> nn.Module:
    given = {"img_size": 32, "patch_size": 8, "depth": 2, "in_chans": 1, **args}
    return timm.create_model("test_vit", num_classes=num_classes, **given)


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, nn.Module]:
    """A file with the weights of a model of seven classes."""
    model = vit(7)
    torch.save(model.state_dict(), tmp_path / "seven.pth")
    return tmp_path / "seven.pth", model


# ---- a local file --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "nested", "ddp", "ema", "safetensors"])
def test_files_as_they_are_found_are_read(kind: str, tmp_path: Path) -> None:
    model, other = vit(), {k: v + 1 for k, v in vit().state_dict().items()}
    weights, file = model.state_dict(), tmp_path / "weights.pth"
    if kind == "safetensors":
        file = tmp_path / "weights.safetensors"
        save_file(weights, file)
    else:
        value = {
            "plain": weights,
            "nested": {"state_dict": weights, "epoch": 3},
            "ddp": {"model": {f"module.{k}": v for k, v in weights.items()}},
            "ema": {"state_dict": other, "state_dict_ema": weights},
        }[kind]
        torch.save(value, file)
    fresh = vit()
    assert load_weights(fresh, str(file)) == "new: nothing; not used: nothing"
    for key, value in weights.items():
        assert torch.equal(fresh.state_dict()[key], value), key


def test_a_classifier_of_other_classes_is_replaced_and_that_is_said(
    source: tuple, tmp_path: Path
) -> None:
    file, model = source
    ended = train(1, *TINY, f"model.checkpoint_path={file}", "dry_run=true", cwd=tmp_path)
    assert ended.codes == [0], ended.all_err
    text = " ".join(ended.all_out.split())
    assert f"weights from {file}; new: head.weight, head.bias; not used: nothing" in text
    cfg = composed(*TINY, f"model.checkpoint_path={file}")
    loaded = build.build_model(cfg, build.build_data(cfg))
    assert loaded.head.weight.shape == (10, 64)
    for key, value in model.state_dict().items():
        if not key.startswith("head."):
            assert torch.equal(loaded.state_dict()[key], value), key


def test_an_image_of_another_size_gets_its_positions_by_timms_conversion(source: tuple) -> None:
    file, model = source
    larger = vit(7, img_size=64)
    assert load_weights(larger, str(file)) == "new: nothing; not used: nothing"
    assert larger.pos_embed.shape == (1, 65, 64) and model.pos_embed.shape == (1, 17, 64)
    assert torch.allclose(larger.pos_embed.mean(), model.pos_embed.mean(), atol=1e-2)


def test_what_a_file_holds_beyond_the_model_is_said(source: tuple) -> None:
    shallow = vit(7, depth=1)
    said = load_weights(shallow, str(source[0]))
    assert said.startswith("new: nothing; not used: blocks.1.norm1.weight") and "more" in said


def test_old_batchnorm_files_without_a_count_are_taken(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    old = {k: v for k, v in model.state_dict().items() if "num_batches" not in k}
    torch.save(old, tmp_path / "old.pth")
    assert load_weights(model, str(tmp_path / "old.pth")) == "new: nothing; not used: nothing"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("another.pth", "matches nothing of this model: it holds conv1.0.weight"),
        ("deeper", "lacks 12 of"),
        ("empty.pth", "it holds no tensors"),
        ("text.pth", "cannot be read as tensors alone"),
        ("text.safetensors", "cannot be read as tensors alone"),
        ("missing.pth", "does not exist"),
        ("missing.safetensors", "does not exist"),
        ("folder", "is no checkpoint"),
    ],
)
def test_a_wrong_file_is_refused_by_name(name: str, said: str, source: tuple) -> None:
    folder = source[0].parent
    resnet = timm.create_model("test_resnet", num_classes=7)
    torch.save(resnet.state_dict(), folder / "another.pth")
    torch.save({"epoch": 3}, folder / "empty.pth")
    for text in ("text.pth", "text.safetensors"):
        (folder / text).write_text("not weights")
    (folder / "folder").mkdir()
    model, file = (vit(7, depth=3), source[0]) if name == "deeper" else (vit(7), folder / name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ConfigError) as error:
        load_weights(model, str(file))
    assert said in str(error.value) and str(file) in str(error.value)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


# ---- the hub, without a network ------------------------------------------------------------------


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_network_pretrained_weights_are_refused_once_and_soon(
    offline: str, tmp_path: Path
) -> None:
    """Under the hub's own switch for machines without a network, and where it finds none."""
    env = {"HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}
    given = ["model=resnet18", "model.pretrained=true"]
    ended = train(2, *given, cwd=tmp_path, env=env, before=no_network, timeout_s=40)
    assert ended.codes == [2, 2]
    told = [line for line in ended.all_err.splitlines() if line.startswith("error:")]
    assert len(told) == 1 and ended.seconds < 15
    assert "no pretrained weights for model.name=resnet18" in told[0]
    assert str(tmp_path / "hf" / "hub") in told[0] and "model.checkpoint_path=" in told[0]
    assert not (tmp_path / "outputs").exists()


def no_network(rank: int) -> None:
    """No name is found, wherever the test runs."""
    import socket

    from huggingface_hub import constants

    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    socket.getaddrinfo = fails
    constants.HF_HUB_OFFLINE = __import__("os").environ["HF_HUB_OFFLINE"] == "1"


# ---- freezing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (["*", "!head*"], {"head.weight", "head.bias"}),
        (["blocks", "patch_embed", "pos_embed", "cls_token"], {"norm", "head"}),
        (["*", "!head*", "head.bias"], {"head.weight"}),
        (["*", "!*.bias", "!fc*"], None),
    ],
)
def test_patterns_freeze_and_take_back_in_order(patterns: list, trained: set | None) -> None:
    model = vit()
    freeze(model, patterns)
    found = {n for n, p in model.named_parameters() if p.requires_grad}
    if trained is None:
        assert found == {n for n, _ in model.named_parameters() if n.endswith(".bias")}
    else:
        assert {n for n in found if not n.startswith(tuple(trained))} == set()
        assert all(any(n.startswith(t) for n in found) for t in trained)


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["backbone"], "backbone matches no parameter; the model has cls_token, pos_embed"),
        (["*"], "leaves nothing to train"),
        (["head.weigh"], "head.weigh matches no parameter"),
    ],
)
def test_patterns_that_make_no_sense_are_refused(patterns: list, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        freeze(vit(), patterns)
    assert said in str(error.value)


def test_frozen_weights_do_not_move_and_the_rest_does() -> None:
    """Weight decay leaves them too."""
    with joined() as world:
        job = job_of(composed(*TINY, "model.freeze=['*','!head*']", "optimizer.lr=0.1"), world)
        before = {n: p.detach().clone() for n, p in job.engine.named_parameters()}
        after = steps(job, 3)["weights"]
    for name, value in before.items():
        assert torch.equal(value, after[name]) != name.startswith("head"), name
