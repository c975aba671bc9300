"""Every timm architecture that classifies is built by name, or refused by a sentence."""

from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from jobs import composed
from torch import nn

from meshwork import build
from meshwork.config import Config, ConfigError
from meshwork.data import Splits
from meshwork.models import timm_model

# What timm lists that has no classifier.
ENCODERS = {
    "deepseek_vit_412m_enc",
    "gemma4_vit_167m_enc",
    "gemma4_vit_570m_enc",
    "mobilenetv5_300m_enc",
    "qwen3_vit_306m_enc",
    "qwen3_vit_416m_enc",
    "qwen3_vit_88m_enc",
}


@cache
def config(*given: str) -> Config:
    return composed("model=timm", "model.name=any", *given)


def built(name: str, classes: int = 7, **more: object) -> nn.Module:
    """As the config builds it, of images of the size that the model was made for."""
    facts = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    channels, size = (more.pop(k, facts.input_size[i]) for i, k in enumerate(("chans", "size")))
    cfg = deepcopy(config(*(f"{k}={v}" for k, v in more.items())))
    cfg.model.name = name
    data = Splits(classes=tuple("abcdefghij"[:classes]), in_chans=channels, image_size=size)
    return build.build_model(cfg, data)


def small(name: str) -> tuple:
    return not any(word in name for word in ("test", "tiny", "nano", "_xx", "_s")), len(name)


def assert_built_or_refused(name: str) -> None:
    """Shapes alone: on the meta device nothing is computed; building checks the output's shape."""
    with torch.device("meta"):
        if name in ENCODERS:
            with pytest.raises(ConfigError, match=f"{name} is an encoder without a classifier"):
                built(name)
        else:
            assert isinstance(built(name), nn.Module)


def test_every_module_of_timm_builds_by_name() -> None:
    """One architecture of each; a few modules hold an encoder besides."""
    names = {min(timm.list_models(module=m), key=small) for m in timm.models.list_modules()}
    assert len(names) > 90
    for name in sorted(names | (ENCODERS & set(timm.list_models()))):
        assert_built_or_refused(name)


@pytest.mark.slow
def test_every_architecture_of_timm_builds_by_name() -> None:
    for name in timm.list_models():
        assert_built_or_refused(name)


@pytest.mark.parametrize("name", timm.list_models("test_*"))
def test_small_ones_of_each_kind_train_on_grey_images(name: str) -> None:
    model = built(name, chans=1).train()
    size = timm.models.get_pretrained_cfg(name).input_size[-1]
    output = model(torch.randn(2, 1, size, size))
    assert output.shape == (2, 7)
    output.logsumexp(1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# ---- what comes from the data --------------------------------------------------------------------


def test_classes_channels_and_size_come_from_the_data() -> None:
    model = built("test_vit", classes=5, chans=1, size=64)
    assert model.head.out_features == 5
    assert model.patch_embed.proj.in_channels == 1
    assert model.patch_embed.img_size == (64, 64)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_classes", 5, "model.num_classes=5, but the data has 7"),
        ("num_classes", 10, "model.num_classes=10, but the data has 7"),
        ("in_chans", 1, "model.in_chans=1, but the data has 3"),
        ("img_size", 64, "model.img_size=64, but the data has 160"),
    ],
)
def test_where_model_and_data_disagree_both_numbers_are_said(
    key: str, value: int, said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        built("test_vit", **{f"model.{key}": value})
    assert said in str(error.value)
    assert isinstance(built("test_vit", **{"model.num_classes": 7}), nn.Module)


def test_a_size_reaches_only_what_fixes_one() -> None:
    """A convolutional net takes any; it would refuse the argument."""
    assert built("test_resnet", size=96).num_classes == 7
    assert built("test_vit", size=96).patch_embed.num_patches == 36


@pytest.mark.parametrize(
    ("name", "size"), [("inception_v3", 32), ("csatv2", 32), ("efficientformer_l1", 32)]
)
def test_images_that_a_model_cannot_take_are_refused_before_anything_starts(
    name: str, size: int
) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot take images of 3 x {size} x {size}"):
        built(name, size=size)


# ---- what is typed -------------------------------------------------------------------------------


def test_arguments_and_rates_are_passed_on() -> None:
    rates = {"model.drop_rate": 0.3, "model.drop_path_rate": 0.2}
    model = built("test_vit", **{"model.args": "{depth: 3, patch_size: 8}"}, **rates)
    assert len(model.blocks) == 3 and model.patch_embed.patch_size == (8, 8)
    assert model.head_drop.p == 0.3
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("test_vit", "{dept: 3}", "unexpected keyword argument 'dept'"),
        ("resnet19", "{}", "resnet19 is not a timm model: did you mean resnet1"),
        ("test_vit", "{num_heads: 3}", "model.name=test_vit cannot be built with"),
        ("zzz", "{}", "model.name=zzz is not a timm model"),
    ],
)
def test_wrong_names_and_arguments_are_refused(name: str, args: str, said: str) -> None:
    data = Splits(classes=tuple("ab"), in_chans=3, image_size=32)
    with pytest.raises(ConfigError) as error:
        build.build_model(composed("model=timm", f"model.name={name}", f"model.args={args}"), data)
    assert said in str(error.value)


def test_data_without_classes_needs_a_number_of_them() -> None:
    with pytest.raises(ConfigError, match=r"needs model\.num_classes"):
        timm_model("test_vit", None, 3, 32)


def test_equal_seeds_give_equal_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        return built("test_vit", seed=seed).head.weight

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_a_head_that_gives_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair(nn.Linear):
        def get_classifier(self) -> nn.Module:
            return self

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image.flatten(1)

    monkeypatch.setattr(timm, "create_model", lambda *_, **__: Pair(2, 2))
    monkeypatch.setattr(timm, "is_model", lambda _: True)
    plain = SimpleNamespace(fixed_input_size=False)
    monkeypatch.setattr(timm.models, "get_pretrained_cfg", lambda *_, **__: plain)
    with pytest.raises(ConfigError, match=r"gives outputs of shape \(2, 12\)"):
        timm_model("odd", 7, 3, 2)


def test_paths_are_dropped_only_where_that_is_asked_for() -> None:
    def rates(drop_path_rate: float) -> set[float]:
        facts = {"num_classes": 3, "in_chans": 3, "img_size": 64, "window_size": 4}
        small = {"embed_dim": 16, "depths": [2, 2], "num_heads": [1, 2]}
        name = "swin_tiny_patch4_window7_224"  # drops a tenth of its own accord
        model = timm_model(name, **facts, **small, drop_path_rate=drop_path_rate)
        return {m.drop_prob for m in model.modules() if isinstance(m, timm.layers.DropPath)}

    assert rates(0.0) <= {0.0}
    assert max(rates(0.2)) == pytest.approx(0.2)


def test_dropout_of_an_architectures_own_is_off_unless_asked_for() -> None:
    """ghostnet calls F.dropout with 0.2 of its own accord."""

    def differs(**given: Any) -> bool:
        model = timm_model("ghostnet_050", num_classes=3, in_chans=3, img_size=64, **given)
        for norm in (m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)):
            norm.eval()
        image = torch.randn(2, 3, 64, 64)
        return not torch.equal(model(image), model(image))

    assert not differs() and differs(drop_rate=0.2)
