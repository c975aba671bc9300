"""Start from given weights, and keep some of them as they are."""

import fnmatch
import inspect
from pathlib import Path

import torch
from torch import nn

from meshwork.config import ConfigError


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Tensors by name from a .safetensors or .pth file or from a checkpoint folder of a run.

    Nothing but tensors is read: no code in the file can run. Raises ConfigError naming the path.
    """
    source = Path(path)
    if source.is_dir():
        from meshwork.checkpoint import read_model
        from meshwork.checkpoint_files import newest

        return read_model(newest(source) or source)
    try:
        if source.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(source)
        found = torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError as e:
        raise ConfigError(f"model.checkpoint_path={path} does not exist") from e
    except Exception as e:
        raise ConfigError(
            f"model.checkpoint_path={path} cannot be read as tensors alone ({type(e).__name__}): "
            "expected a .safetensors file, a .pth file of tensors, or a checkpoint folder of a run"
        ) from e
    for name in ("state_dict_ema", "model_ema", "state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
            break
    tensors = (
        {k: v for k, v in found.items() if torch.is_tensor(v)} if isinstance(found, dict) else {}
    )
    return {k.removeprefix("module."): v for k, v in tensors.items()}


def load_weights(model: nn.Module, path: str) -> str:
    """Load weights by name into the bare model; says which tensors are new and which were not used.

    Positions and patches of another size go through timm's own conversion. Only the classifier may
    differ in shape (another number of classes). Raises ConfigError where anything else is missing.
    """
    tensors = read_weights(path)
    convert = getattr(inspect.getmodule(type(model)), "checkpoint_filter_fn", None)
    if convert is not None:
        tensors = convert(tensors, model)
    own = model.state_dict()
    matching = {k: v for k, v in tensors.items() if k in own and v.shape == own[k].shape}
    if not matching:
        raise ConfigError(
            f"model.checkpoint_path={path} matches nothing of this model: it holds "
            f"{', '.join(list(tensors)[:3]) or 'no tensors'}, the model {', '.join(list(own)[:3])}"
        )
    # Old files of BatchNorm lack the count, which nothing but a cumulative average reads.
    left = [k for k in own if k not in matching and not k.endswith("num_batches_tracked")]
    heads = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    foreign = [k for k in left if not k.startswith(tuple(f"{h}." for h in heads) or ("\0",))]
    if foreign:
        raise ConfigError(
            f"model.checkpoint_path={path} lacks {len(foreign)} of {len(own)} tensors of this "
            f"model, or holds them in another shape: {', '.join(foreign[:5])}: choose the model "
            "they come from"
        )
    model.load_state_dict(matching, strict=False)
    unused = [k for k in tensors if k not in own]
    return f"new: {_shown(left)}; not used: {_shown(unused)}"


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return (", ".join(names[:4]) or "nothing") + more


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Switch off the gradient of parameters whose names match.

    patterns, in order: `head` or `head.*` freezes, `!head.*` takes back; a module's name stands for
    all below it. Raises ConfigError where a pattern matches nothing or nothing is left to train.
    """
    names = [n for n, _ in model.named_parameters()]
    frozen: set[str] = set()
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        hit = {n for n in names if fnmatch.fnmatchcase(n, plain) or n.startswith(plain + ".")}
        if pattern.startswith("!"):
            frozen -= hit
        elif hit:
            frozen |= hit
        else:
            tops = ", ".join(dict.fromkeys(n.split(".")[0] for n in names))
            raise ConfigError(f"model.freeze: {pattern} matches no parameter; the model has {tops}")
    if names and len(frozen) == len(names):
        raise ConfigError(
            f"model.freeze={patterns} leaves nothing to train: take the classifier back, for "
            "example model.freeze=['*','!head*']"
        )
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
