"""Any timm architecture that classifies, by name."""

import difflib
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd

from meshwork.config import ConfigError
from meshwork.models.hub import first_line, from_hub
from meshwork.models.unchanged import unchanged


def timm_model(
    name: str,
    num_classes: int | None,
    in_chans: int,
    img_size: int | None,
    pretrained: bool = False,
    drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    timeout_s: float = 600,
    **args: Any,
) -> nn.Module:
    """timm's `create_model` with sentences for errors.

    img_size reaches only architectures that fix it. Pretrained weights come from the hub through
    one process of a node at a time; the others find them in the cache. Raises ConfigError for an
    unknown name, an encoder without a classifier, arguments that do not fit and weights that cannot
    be had.
    """
    import timm

    bare_name = name.rsplit("/", 1)[-1].split(".")[0]
    if not name.startswith(("hf-hub:", "local-dir:")) and not timm.is_model(bare_name):
        near = difflib.get_close_matches(bare_name, timm.list_models(), 3)
        raise ConfigError(
            f"model.name={name} is not a timm model"
            + (f": did you mean {', '.join(near)}?" if near else "")
        )
    if num_classes is None:
        raise ConfigError(f"model.name={name} needs model.num_classes: the data names no classes")
    given = timm_arguments(name, num_classes, in_chans, img_size, args)
    # Families that know no dropout or stochastic depth refuse the argument, so 0 is left unsaid.
    given |= {"drop_rate": drop_rate} if drop_rate else {}
    given |= {"drop_path_rate": drop_path_rate} if drop_path_rate else {}
    if pretrained:
        model = from_hub(lambda: _create(name, given, pretrained=True), name, timeout_s)
    else:
        model = _create(name, given)
    for module in model.modules():  # some architectures have rates of their own, but 0 is 0
        if not drop_path_rate and isinstance(module, timm.layers.DropPath):
            module.drop_prob = 0.0
        if not drop_rate and not any("drop" in key for key in args):
            if isinstance(module, _DropoutNd):
                module.p = 0.0
            elif isinstance(getattr(module, "drop_rate", None), float):  # for F.dropout
                module.drop_rate = 0.0
    _check_classifier(model, name)
    if img_size is not None:
        _check_output(model, name, (in_chans, img_size, img_size), num_classes)
    return model


def timm_arguments(
    name: str, num_classes: int, in_chans: int, img_size: int | None, args: dict
) -> dict[str, Any]:
    """What `timm.create_model` is given beside the name, rates of dropout aside."""
    import timm

    config = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    given = {"num_classes": num_classes, "in_chans": in_chans, **args}
    if img_size is not None and config is not None and config.fixed_input_size:
        given.setdefault("img_size", img_size)
    return given


def _create(name: str, given: dict, **more: Any) -> nn.Module:
    import timm

    try:
        return timm.create_model(name, **given, **more)
    except (TypeError, AssertionError, ValueError, AttributeError, KeyError) as e:
        shown = ", ".join(f"{k}={v}" for k, v in given.items())
        raise ConfigError(
            f"model.name={name} cannot be built with {shown} ({type(e).__name__}: {e}): "
            "change data.image_size, model.args or the key named"
        ) from e


def _check_classifier(model: nn.Module, name: str) -> None:
    head = model.get_classifier() if hasattr(model, "get_classifier") else None
    heads = head if isinstance(head, (tuple, list)) else [head]
    if all(h is None or isinstance(h, nn.Identity) for h in heads):
        raise ConfigError(
            f"model.name={name} is an encoder without a classifier: choose another architecture, "
            "or wrap it in a module of your own (README: add a model)"
        )


@torch.no_grad()
def _check_output(model: nn.Module, name: str, image: tuple[int, ...], num_classes: int) -> None:
    """Images too small, or of a size that some layer cannot take, are answered before any rank
    starts."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    shadows = {n: t.to("meta") for n, t in tensors}  # shapes alone: milliseconds for any model
    try:
        with unchanged(model):
            model.eval()
            try:
                empty = torch.empty(2, *image, device="meta")
                # Tied weights would be put back wrong where one module stands in two places.
                output = functional_call(model, shadows, (empty,), tie_weights=False)
            except Exception:  # perhaps only of the meta device: the image decides
                output = model(torch.zeros(2, *image))
        shape = tuple(output.shape)
    except Exception as e:
        raise ConfigError(
            f"model.name={name} cannot take images of {' x '.join(map(str, image))} "
            f"({first_line(e)}): set another data.image_size, or choose another architecture"
        ) from e
    if shape != (2, num_classes):
        raise ConfigError(
            f"model.name={name} gives outputs of shape {shape} for 2 images: expected "
            f"(2, {num_classes}); change model.args, or wrap it in a module of your own "
            "(README: add a model)"
        )
