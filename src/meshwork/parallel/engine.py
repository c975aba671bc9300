"""The engine: what the loop sees of a model, the same in every layout."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from meshwork.batch import Batch, BatchPlan
from meshwork.config import Config, ConfigError
from meshwork.distributed import World
from meshwork.mesh import Layout
from meshwork.parallel.batchnorm import (
    RunningStatistics,
    average_statistics,
    batch_norms,
    is_frozen,
)
from meshwork.parallel.fsdp import local, total_norm

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(precision: str, device_type: str) -> Callable:
    """A context for forward and loss."""
    if precision not in AUTOCAST:
        return nullcontext
    return lambda: torch.autocast(device_type, AUTOCAST[precision])


class Engine:
    """A model on its ranks, whole or in stages.

    parts: the modules this rank holds, under the bare model's names. module: the only part, or all
    in a list. wrapped: what is called in training. counts: true on exactly one rank for each
    sample. data_rank: data-parallel coordinate of this rank. shapes: of the bare model's state.
    fused: groups of parameters whose rows lie rank by rank. mesh: None where only DDP is at work.
    """

    def __init__(
        self,
        parts: list[nn.Module],
        wrapped: nn.Module,
        task: object,
        cfg: Config,
        layout: Layout,
        plan: BatchPlan,
        world: World,
        shapes: dict[str, torch.Size],
        fused: dict[str, int],
        mesh: DeviceMesh | None,
    ):
        self.parts, self.wrapped, self.task = parts, wrapped, task
        self.module = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
        self.plan, self.world, self.mesh, self.layout = plan, world, mesh, layout
        rank = world.ranks.rank
        self.data_rank = layout.data_rank(rank)
        self.counts = layout.tp_rank(rank) == 0
        axes = [a for a in ("dp_replicate", "dp_shard") if getattr(layout, a) > 1]
        self.data_groups = [mesh.get_group(a) for a in axes] if mesh else [None] * bool(axes)
        self.shapes, self.fused = shapes, fused
        precision, kind = cfg.trainer.precision, world.device.type
        self.dtype = torch.float64 if precision == "fp64" else None
        self.autocast = autocast_of(precision, kind)
        self.scaler = torch.amp.GradScaler(kind, enabled=True) if precision == "fp16" else None
        self._frozen_norms = [m for m in batch_norms(self.module) if is_frozen(m)]
        self._no_sync = getattr(wrapped, "no_sync", nullcontext)
        # With one micro-batch a rank in every step BatchNorm's own update is the right one.
        once = cfg.parallel.activation_checkpointing == "none"
        plain = plan.n_micro == 1 and cfg.data.drop_last and once
        self._statistics = RunningStatistics(self.module) if plan.coupled and not plain else None
        self._grads_checked = cfg.parallel.find_unused_parameters
        self._constant: tuple = (None, None)

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode; frozen BatchNorm stays in evaluation mode."""
        self.wrapped.train(mode)
        for norm in self._frozen_norms:
            norm.eval()
        if mode:
            self.forget_gathered()

    def forget_gathered(self) -> None:
        """Give up the whole weights that an evaluation has gathered from their shards."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank under the names of the bare model."""
        for part in self.parts:
            yield from part.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors of this rank under the names of the bare model; what is split are DTensors."""
        return tensors_of(self.parts)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Around a forward that is run again in the backward: it counts for no statistics."""
        statistics = self._statistics
        if statistics is None:
            yield
            return
        before, statistics.skip = statistics.skip, True
        try:
            yield
        finally:
            statistics.skip = before

    def step(self, batch: Batch) -> dict[str, Tensor]:
        """Forward and backward over the micro-batches of one optimizer step.

        batch: this rank's rows, on the device. Returns this rank's part of the mean loss, and of
        each part of the loss that the task names: device scalars whose sum over the job is the
        mean. Gradients are those of the mean loss over the whole step, averaged as the wrapper does
        it.
        """
        divisor = self._divisor(batch)
        micro_batches = batch.split(self.plan.micro)
        counts = self._statistics is not None
        n_real = self.plan.real_micro(self.data_rank, batch.total) if counts else 0
        shares = self._run(micro_batches, n_real, divisor)
        if counts:
            self._statistics.commit(n_real * self.plan.ranks * self.plan.micro / batch.total)
        if not self._grads_checked:
            self._check_gradients()
        return shares if self.counts else {k: v * 0 for k, v in shares.items()}

    def _run(self, micro_batches: list[Batch], n_real: int, divisor: Tensor | int) -> dict:
        """Shares of the step; n_real: micro-batches that are no dummies, where BatchNorm counts."""
        last, shares = len(micro_batches) - 1, None
        for i, micro in enumerate(micro_batches):
            with nullcontext() if i == last else self._no_sync():
                if self._statistics is not None:
                    self._statistics.skip = i >= n_real
                with self.autocast():
                    loss, parts = self._loss(self.wrapped(*micro.inputs), micro)
                gradient = self._gradient(micro, divisor, loss.dtype)
                loss.backward(gradient if self.scaler is None else self.scaler.scale(gradient))
            found = self._shares(loss, parts, micro, divisor)
            shares = found if shares is None else {k: shares[k] + v for k, v in found.items()}
        return shares

    def _shares(self, loss: Tensor, parts: dict, batch: Batch, divisor: Tensor | int) -> dict:
        return {
            name: masked_sum(value.detach(), batch.weight, batch.uniform) / divisor
            for name, value in {"loss": loss, **parts}.items()
        }

    def _gradient(self, batch: Batch, divisor: Tensor | int, dtype: torch.dtype) -> Tensor:
        """The mean's gradient by each sample's loss; the wrapper averages over data ranks."""
        if not batch.uniform or torch.is_tensor(divisor):
            return (batch.weight * (self.plan.ranks / divisor)).to(dtype)
        key = (len(batch), divisor, dtype)
        if self._constant[0] != key:  # the same in nearly every step
            scale = self.plan.ranks / divisor
            self._constant = key, torch.full_like(batch.weight, scale, dtype=dtype)
        return self._constant[1]

    def _divisor(self, batch: Batch) -> Tensor | int:
        """What the sum of losses is divided by: the step's weight over all data ranks."""
        if not hasattr(self.task, "weight"):
            return batch.total
        total = masked_sum(self.task.weight(batch), batch.weight, batch.uniform)
        total = total.to(batch.weight.dtype)
        for group in self.data_groups:
            dist.all_reduce(total, group=group)
        return torch.where(total > 0, total, 1)  # a step in which nothing counts changes nothing

    def _loss(self, output: object, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        found = self.task.loss(output, batch)
        loss, parts = found if isinstance(found, tuple) else (found, {})
        if loss.shape != batch.weight.shape:
            raise ConfigError(
                f"{type(self.task).__name__}.loss returned shape {tuple(loss.shape)} for "
                f"{len(batch)} samples: expected one value a sample (reduction='none')"
            )
        return loss, parts

    def _check_gradients(self) -> None:
        """After the first backward: DDP would wait for parameters that got no gradient."""
        self._grads_checked = True
        trained = {n: p for n, p in self.named_parameters() if p.requires_grad}
        unused = [n for n, p in trained.items() if p.grad is None]
        if unused and isinstance(self.wrapped, DistributedDataParallel):
            prefixes = ",".join(common_prefixes(unused, trained))
            raise ConfigError(
                f"{len(unused)} parameters got no gradient ({', '.join(unused[:5])}): use them "
                f"in the loss, freeze them (model.freeze=[{prefixes}]), or set "
                "parallel.find_unused_parameters=true where that differs from step to step"
            )

    def clip_grad_norm(self, largest: float | None) -> Tensor:
        """Norm of the whole model's gradient before clipping, the same on all ranks.

        largest: scale gradients down to this norm; None leaves them. A norm that is not finite
        scales to nan, on all ranks alike.
        """
        gradients = [p.grad for _, p in self.named_parameters() if p.grad is not None]
        if self.mesh is None:
            norm = torch.nn.utils.get_total_norm(gradients)
        else:
            norm = total_norm(gradients, self.mesh, self.world.device)
        if largest is not None and gradients:
            factor = (largest / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([local(g) for g in gradients], factor.to(gradients[0].dtype))
        return norm

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """One optimizer step; with fp16 skipped where a gradient overflowed."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring fp16 gradients to their true size, before their norm is taken."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    @torch.no_grad()
    def predict(self, batch: Batch) -> object:
        """Output of the model for a batch on the device; None where this rank does not hold it."""
        with self.autocast():
            return self.module(*batch.inputs)

    def sync_buffers(self) -> None:
        """Average BatchNorm's running statistics over data ranks; before validation and saving."""
        if self.plan.coupled and self.plan.ranks > 1:
            average_statistics(self.module, self.plan.ranks, self.data_groups)


def masked_sum(values: Tensor, weight: Tensor, uniform: bool) -> Tensor:
    """Weighted sum of per-sample values; what a padded row holds does not matter, not even nan."""
    if uniform:
        return values.sum()
    return torch.where(weight > 0, values * weight, 0).sum()


def common_prefixes(some: Collection[str], names: Collection[str]) -> list[str]:
    """The fewest dotted prefixes that stand for exactly these of all names."""
    found: dict[str, None] = {}
    for name in some:
        parts = name.split(".")
        prefixes = (".".join(parts[:i]) for i in range(1, len(parts) + 1))
        below = (
            p for p in prefixes if all(n in some for n in names if f"{n}.".startswith(f"{p}."))
        )
        found[next(below)] = None
    return list(found)


def tensors_of(parts: list[nn.Module]) -> dict[str, Tensor]:
    """The state of modules as one dict of tensors by name."""
    return {k: v for part in parts for k, v in part.state_dict().items() if torch.is_tensor(v)}
