"""Optimizers with their parameter groups, and schedules as functions of the progress."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

from meshwork import build, config
from meshwork.batch import BatchPlan
from meshwork.data.loader import step_size

# Families of timm that the loop or a checkpoint cannot serve.
NOT_HERE = {
    "kron": "draws random numbers and keeps lists that no checkpoint would hold",
    "adahessian": "needs second derivatives, which the loop does not compute",
}


def group_options(
    model: nn.Module, weight_decay: float, layer_decay: float | None
) -> dict[str, tuple[float, float]]:
    """{parameter name: (weight decay, factor of the learning rate)} of what is trained.

    Norms, biases and what `model.no_weight_decay()` names are not decayed. layer_decay: the factor
    falls by it for each layer further from the output, layers as timm groups them
    (https://arxiv.org/abs/2003.10555).
    """
    from timm.optim import param_groups_layer_decay, param_groups_weight_decay

    exempt = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    given = {"weight_decay": weight_decay, "no_weight_decay_list": exempt}
    if layer_decay is None:
        groups = param_groups_weight_decay(model, **given)
    else:
        groups = param_groups_layer_decay(model, **given, layer_decay=layer_decay)
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        names[id(p)]: (group["weight_decay"], group.get("lr_scale", 1.0))
        for group in groups
        for p in group["params"]
    }


def build_optimizer(
    cfg: config.Optimizer,
    parameters: Iterable[tuple[str, nn.Parameter]],
    options: dict[str, tuple[float, float]],
) -> torch.optim.Optimizer:
    """The optimizer over an engine's parameters, grouped by `options` (see group_options).

    Raises ConfigError for values that the optimizer refuses.
    """
    groups: dict[tuple, list] = {}
    for name, parameter in parameters:
        if name in options:  # tensors of two meshes do not go through one operation
            key = (*options[name], getattr(parameter, "device_mesh", None))
            groups.setdefault(key, []).append(parameter)
    dicts = [
        {"params": params, "weight_decay": decay, "lr": cfg.lr * scale}
        for (decay, scale, _), params in groups.items()
    ]
    offered = {"lr": cfg.lr, "weight_decay": cfg.weight_decay, "name": cfg.name}
    try:
        return build.call(cfg._target_, cfg.args, offered, "optimizer", dicts)
    except (ValueError, TypeError) as e:
        raise config.ConfigError(f"{cfg._target_} refuses optimizer.args={cfg.args}: {e}") from e


def timm_optimizer(
    params: list, name: str, lr: float, weight_decay: float = 0.0, **args: Any
) -> torch.optim.Optimizer:
    """An optimizer of timm by name; params are groups. Raises ConfigError for an unknown name."""
    import difflib

    from timm.optim import create_optimizer_v2, list_optimizers

    if name not in list_optimizers():
        near = difflib.get_close_matches(str(name), list_optimizers(), 3)
        raise config.ConfigError(
            f"optimizer.name={name} is not an optimizer of timm"
            + (f": did you mean {', '.join(near)}?" if near else "")
        )
    for prefix, reason in NOT_HERE.items():
        if name.startswith(prefix):
            raise config.ConfigError(f"optimizer.name={name} {reason}: choose another")
    try:
        return create_optimizer_v2(params, opt=name, lr=lr, weight_decay=weight_decay, **args)
    except (AssertionError, ImportError) as e:
        raise config.ConfigError(f"optimizer.name={name} cannot be built here: {e}") from e


@dataclass(frozen=True)
class Horizon:
    """How long a run is.

    steps: its length and the schedule's. epoch_steps: steps of one epoch. from_step, from_epoch:
    where steps of this size began, after a checkpoint of another batch size.
    """

    steps: int
    epoch_steps: int
    from_step: int = 0
    from_epoch: float = 0.0

    def epoch(self, step: int) -> float:
        """Epochs done after `step` updates."""
        return self.from_epoch + (step - self.from_step) / self.epoch_steps

    @classmethod
    def of(cls, cfg: config.Config, n: int, plan: BatchPlan) -> "Horizon":
        """For n training samples; raises ConfigError where an epoch would have no step."""
        rest = step_size(n, plan, n - n % plan.global_batch, cfg.data.drop_last)
        epoch_steps = n // plan.global_batch + (rest > 0)
        if epoch_steps == 0:
            size = plan.global_batch
            raise config.ConfigError(
                f"{n} training samples do not fill one step of trainer.global_batch_size={size}: "
                + (f"set it to {n} or less, or data.drop_last=false" if n else "look at the data")
            )
        return cls(cfg.trainer.max_steps or cfg.trainer.max_epochs * epoch_steps, epoch_steps)


class Schedule:
    """Sets the learning rate before each step: the group's own rate times warm-up times a factor.

    The factor is what `scheduler._target_` returns for those of `progress` (0 to 1, after warm-up),
    `epoch` (fractional), `step` and `milestones` that it names: a pure function of the step, so
    there is nothing to save.
    """

    def __init__(self, cfg: config.Scheduler, optimizer: torch.optim.Optimizer, horizon: Horizon):
        build.call(cfg._target_, cfg.args, _facts(0.0, 0.0, 0, cfg), "scheduler")
        self.function = build.resolve(cfg._target_, "scheduler._target_")
        self.names = [
            n for n in _facts(0.0, 0.0, 0, cfg) if n in signature(self.function).parameters
        ]
        epochs = (cfg.warmup_epochs or 0) * horizon.epoch_steps
        self.warmup = round(epochs) if cfg.warmup_epochs is not None else cfg.warmup_steps or 0
        self.cfg, self.optimizer, self.horizon = cfg, optimizer, horizon
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def factor(self, step: int) -> float:
        """Factor of the learning rate for the update after `step` finished ones."""
        progress = (step - self.warmup) / max(1, self.horizon.steps - self.warmup)
        epoch = self.horizon.epoch(step)
        facts = _facts(min(max(progress, 0.0), 1.0), epoch, step, self.cfg)
        value = self.function(**{n: facts[n] for n in self.names}, **self.cfg.args)
        return value * min(1.0, (step + 1) / self.warmup) if self.warmup else value

    def set(self, step: int) -> float:
        """Set every group's rate for the next update; returns the largest."""
        factor = self.factor(step)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        return max(self.rates) * factor


def _facts(progress: float, epoch: float, step: int, cfg: config.Scheduler) -> dict:
    return {"progress": progress, "epoch": epoch, "step": step, "milestones": cfg.milestones}


def check(
    cfg: config.Config, model: nn.Module, data: Any, plan: BatchPlan
) -> tuple[Horizon, dict[str, tuple[float, float]]]:
    """Horizon and group options of a run.

    Raises ConfigError for what optimizer or schedule would refuse later, and for a warm-up that is
    not shorter than the training.
    """
    trains = cfg.mode == "train" and data.train is not None
    horizon = Horizon.of(cfg, len(data.train) if trains else plan.global_batch, plan)
    options = group_options(model, cfg.optimizer.weight_decay, cfg.optimizer.layer_decay)
    optimizer = build_optimizer(cfg.optimizer, model.named_parameters(), options)
    schedule = Schedule(cfg.scheduler, optimizer, horizon)
    if trains and schedule.warmup >= horizon.steps:
        key = "warmup_steps" if cfg.scheduler.warmup_epochs is None else "warmup_epochs"
        raise config.ConfigError(
            f"scheduler.{key}={getattr(cfg.scheduler, key)} is {schedule.warmup} steps of a run of "
            f"{horizon.steps}: make the warm-up shorter or the run longer"
        )
    return horizon, options


def cosine(progress: float, final: float = 0.0) -> float:
    """Half a cosine from 1 to `final` (https://arxiv.org/abs/1608.03983)."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def wsd(progress: float, decay: float = 0.1, final: float = 0.0) -> float:
    """1, then linear to `final` over the last share `decay` (https://arxiv.org/abs/2404.06395)."""
    left = min(1.0, (1 - progress) / decay)
    return final + (1 - final) * left


def multistep(epoch: float, milestones: list[float], gamma: float = 0.1) -> float:
    """Times `gamma` after each milestone, in epochs."""
    return gamma ** sum(epoch >= m for m in milestones)


def constant() -> float:
    """1 all the way."""
    return 1.0
