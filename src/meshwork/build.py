"""The one place that turns a `_target_` of the config into an object, behind a list of packages."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import OmegaConf

from meshwork.config import Config, ConfigError, Model, resolved_yaml
from meshwork.provenance import redact

# What a config may call. Add your own package here; meshwork itself is the first.
ALLOWED = (__name__.split(".")[0], "timm", "torch.nn", "torch.optim", "torchvision")


def resolve(target: str, key: str) -> Callable:
    """The callable that a dotted path names.

    The object itself must come from an allowed package: a path through one (`timm.data.os.system`)
    does not count. Raises ConfigError naming `key`.
    """
    if not _allowed(target):
        raise ConfigError(_refusal(target, key))
    try:
        found = get_object(target)
    except Exception as e:
        reason = " ".join(str(e).splitlines()[1:]) or e
        raise ConfigError(f"{key}={target} is not to be found: {reason}") from e
    if not callable(found) or not _allowed(f"{getattr(found, '__module__', '')}."):
        raise ConfigError(_refusal(target, key))
    return found


def _allowed(path: str) -> bool:
    return any(path.startswith(prefix + ".") for prefix in ALLOWED)


def _refusal(target: str, key: str) -> str:
    return (
        f"{key}={target} is not from an allowed package ({', '.join(ALLOWED)}): "
        f"put the code there, or add its package to ALLOWED in {__name__.replace('.', '/')}.py"
    )


def call(target: str, args: Mapping, offered: Mapping, key: str, *positional: Any) -> Any:
    """Call a target with `args` from the config and those of `offered` that its signature names.

    A dict inside `args` that holds a `_target_` is built first. What is typed in `args` wins.
    Raises ConfigError where an argument is unknown (with the nearest), missing or refused by the
    target.
    """
    function = resolve(target, f"{key}._target_")
    names = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in names.values())
    wrong = [] if open_ended else [a for a in args if a not in names]
    if wrong:
        near = difflib.get_close_matches(wrong[0], names, 1)
        takes = f"did you mean {near[0]}?" if near else f"it takes {', '.join(names)}"
        raise ConfigError(f"{key}.args.{wrong[0]}: {target} takes no such argument; {takes}")
    given = {k: v for k, v in offered.items() if k in names} | {
        k: nested(v, f"{key}.args.{k}") for k, v in args.items()
    }
    try:
        inspect.signature(function).bind(*positional, **given)
    except TypeError as e:
        raise ConfigError(f"{key}.args: {target}: {e}") from e
    try:
        return function(*positional, **given)
    except TypeError as e:
        if "unexpected keyword argument" in str(e):
            raise ConfigError(f"{key}.args: {e}") from e
        raise


def nested(value: Any, key: str) -> Any:
    """A value of `args`, with every dict that holds a `_target_` built."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            args = {k: v for k, v in value.items() if k != "_target_"}
            return call(value["_target_"], args, {}, key)
        return {k: nested(v, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [nested(v, f"{key}[{i}]") for i, v in enumerate(value)]
    return value


def build_data(cfg: Config) -> Any:
    """The data sets of a run: what `data._target_` returns (see meshwork.data.Splits)."""
    d = cfg.data
    offered = {k: v for k, v in vars(d).items() if k not in ("_target_", "args", "augment")}
    offered |= {"seed": cfg.seed, "in_chans": cfg.model.in_chans, "mode": cfg.mode}
    return call(d._target_, d.args, offered, "data")


def data_facts(data: Any) -> dict[str, Any]:
    """What every rank must find alike: sizes of the sets, names of the classes."""
    sets = {name: getattr(data, name, None) for name in ("train", "val", "test", "predict")}
    sizes = {name: len(s) for name, s in sets.items() if s is not None}
    return {**sizes, "classes": list(data.classes)}


def build_task(cfg: Config, data: Any) -> Any:
    """The task: what computes loss and metrics."""
    offered = {"label_smoothing": cfg.task.label_smoothing, "classes": data.classes}
    if cfg.task.criterion is not None:
        if "_target_" not in cfg.task.criterion:
            raise ConfigError(
                "task.criterion has no _target_: write "
                "task.criterion._target_=torch.nn.CrossEntropyLoss"
            )
        args = {k: v for k, v in cfg.task.criterion.items() if k != "_target_"}
        unreduced = {"reduction": "none"}
        offered["criterion"] = call(
            cfg.task.criterion["_target_"], args, unreduced, "task.criterion"
        )
    return call(cfg.task._target_, cfg.task.args, offered, "task")


def build_model(cfg: Config, data: Any) -> Any:
    """The bare model on the CPU: equal weights on every rank for the same seed.

    Raises ConfigError where model and data disagree on classes, channels or image size.
    """
    import torch

    from meshwork.models.weights import freeze, load_weights

    m = cfg.model
    torch.manual_seed(cfg.seed)
    pretrained = m.pretrained and m.checkpoint_path is None  # a file needs no hub
    model = bare_model(m, data, pretrained, cfg.runtime.timeout_s)
    if m.checkpoint_path is not None:
        model.loaded = load_weights(model, m.checkpoint_path)  # for the start table
    freeze(model, m.freeze)
    if cfg.trainer.precision == "fp64":
        model = model.double()
    return model


def bare_model(m: Model, data: Any, pretrained: bool, timeout_s: float = 600) -> Any:
    """What `model._target_` makes for data of these classes, channels and image size.

    Raises ConfigError where model and data disagree on them.
    """
    facts = {
        "num_classes": len(data.classes) or None,
        "in_chans": data.in_chans,
        "img_size": data.image_size,
    }
    for name, found in facts.items():
        typed = getattr(m, name)
        if None not in (typed, found) and typed != found:
            raise ConfigError(
                f"model.{name}={typed}, but the data has {found}: "
                f"drop model.{name} to take it from the data"
            )
    offered = {k: v for k, v in vars(m).items() if k not in ("_target_", "args", "freeze")}
    offered |= {k: getattr(m, k) or found for k, found in facts.items()}
    offered |= {"pretrained": pretrained, "timeout_s": timeout_s}
    return call(m._target_, m.args, offered, "model")


def image_facts(model: Any) -> dict[str, Any]:
    """mean, std, interpolation and crop_pct that a model was made for; ImageNet's where it says
    none."""
    from timm.data import resolve_data_config

    known = getattr(model, "pretrained_cfg", None) or {}
    return resolve_data_config({"in_chans": 3}, pretrained_cfg=dict(known))


def input_facts(data: Any, model: Any) -> dict[str, Any]:
    """What a checkpoint keeps so that its model can be used without the data: plain values."""
    names = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
    images = {k: v for k, v in image_facts(model).items() if k in names}
    sizes = {"in_chans": data.in_chans, "image_size": data.image_size}
    return {"classes": list(data.classes), **sizes, "images": images}


def build_samples(cfg: Config, dataset: Any, data: Any, model: Any, task: Any, train: bool) -> Any:
    """A data set with the transforms that belong to model and config, ready for the loader."""
    from meshwork.data.loader import Samples
    from meshwork.data.transforms import eval_transform, train_transform

    facts = image_facts(model)
    if train:
        transform = train_transform(cfg.data.augment, facts, data.image_size, data.in_chans)
    else:
        transform = eval_transform(facts, data.image_size, data.in_chans)
    inputs = tuple(getattr(task, "inputs", ()))
    return Samples(dataset, transform, cfg.seed, train, inputs, cfg.data.on_bad_image)


def example_inputs(cfg: Config, data: Any, model: Any, task: Any, rows: int) -> tuple:
    """What the model is called with: copies of one real sample, on the CPU."""
    import numpy as np
    import torch

    from meshwork.data.loader import BadImage, Step, explain

    sets = (data.train, data.val, data.test, data.predict)
    dataset = next((s for s in sets if s is not None and len(s)), None)
    if dataset is None:
        raise ConfigError("the data has no samples: look at data.root")
    samples = build_samples(cfg, dataset, data, model, task, train=False)
    try:
        batch = samples[Step(0, 0, np.arange(1), rows, 1)]
    except BadImage as e:
        raise ConfigError(explain(e)) from e
    dtype = torch.float64 if cfg.trainer.precision == "fp64" else None
    return batch.to(torch.device("cpu"), dtype).inputs


def check_logger(cfg: Config) -> None:
    """Refuse, before anything heavy, a logger that could not start."""
    from meshwork import logger

    if cfg.logger._target_ is None:
        return
    if resolve(cfg.logger._target_, "logger._target_") is logger.WandbLogger:
        logger.check_wandb(cfg.logger.mode, cfg.logger.args)


def build_loggers(cfg: Config, run: Any, sweep: tuple[str, int] | None) -> list:
    """The loggers besides metrics.jsonl; a sweep is a group of its own."""
    if cfg.logger._target_ is None:
        return []
    group = cfg.run.group or (Path(sweep[0]).name if sweep else None)
    plain = OmegaConf.create(redact(resolved_yaml(cfg)))
    offered = {k: v for k, v in vars(cfg.logger).items() if k not in ("_target_", "args")} | {
        "folder": run.path,
        "config": OmegaConf.to_container(plain),
        "run": replace(cfg.run, group=group),
        "run_id": run.id,
    }
    return [call(cfg.logger._target_, cfg.logger.args, offered, "logger")]
