"""The engine: what the loop sees of a model, the same in every layout."""

import os
from collections.abc import Collection, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
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

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Engine:
    """A model on its ranks.

    module: the bare model, on the device. parts: the modules this rank holds. counts: true on
    exactly one rank for each sample. data_rank: data-parallel coordinate of this rank.
    """

    def __init__(
        self,
        module: nn.Module,
        wrapped: nn.Module,
        task: object,
        plan: BatchPlan,
        data_rank: int,
        world: World,
        cfg: Config,
    ):
        self.module, self.wrapped, self.task = module, wrapped, task
        self.parts = [module]
        self.plan, self.data_rank, self.world = plan, data_rank, world
        self.counts = True
        precision, kind = cfg.trainer.precision, world.device.type
        self.dtype = torch.float64 if precision == "fp64" else None
        self.autocast = (
            (lambda: torch.autocast(kind, AUTOCAST[precision]))
            if precision in AUTOCAST
            else nullcontext
        )
        self.scaler = torch.amp.GradScaler(kind, enabled=True) if precision == "fp16" else None
        self._frozen_norms = [m for m in batch_norms(module) if is_frozen(m)]
        self._no_sync = getattr(wrapped, "no_sync", nullcontext)
        # With one micro-batch a rank in every step BatchNorm's own update is the right one.
        plain = plan.n_micro == 1 and cfg.data.drop_last
        self._statistics = RunningStatistics(module) if plan.coupled and not plain else None
        self._grads_checked = cfg.parallel.find_unused_parameters
        self._constant: tuple = (None, None)

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode; frozen BatchNorm stays in evaluation mode."""
        self.wrapped.train(mode)
        for norm in self._frozen_norms:
            norm.eval()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank under the names of the bare model."""
        return self.module.named_parameters()

    def step(self, batch: Batch) -> dict[str, Tensor]:
        """Forward and backward over the micro-batches of one optimizer step.

        batch: this rank's rows, on the device. Returns this rank's part of the mean loss, and of
        each part of the loss that the task names: device scalars whose sum over the job is the
        mean. Gradients are those of the mean loss over the whole step, averaged as the wrapper does
        it.
        """
        divisor = self._divisor(batch)
        micro_batches = batch.split(self.plan.micro)
        last, shares = len(micro_batches) - 1, None
        if self._statistics is not None:
            n_real = self.plan.real_micro(self.data_rank, batch.total)
        for i, micro in enumerate(micro_batches):
            with nullcontext() if i == last else self._no_sync():
                if self._statistics is not None:
                    self._statistics.skip = i >= n_real
                with self.autocast():
                    loss, parts = self._loss(self.wrapped(*micro.inputs), micro)
                gradient = self._gradient(micro, divisor, loss.dtype)
                loss.backward(gradient if self.scaler is None else self.scaler.scale(gradient))
            found = {
                name: masked_sum(value.detach(), micro.weight, batch.uniform) / divisor
                for name, value in {"loss": loss, **parts}.items()
            }
            shares = found if shares is None else {k: shares[k] + v for k, v in found.items()}
        if self._statistics is not None:
            self._statistics.commit(n_real * self.plan.ranks * self.plan.micro / batch.total)
        if not self._grads_checked:
            self._check_gradients()
        return shares

    def _gradient(self, batch: Batch, divisor: Tensor | int, dtype: torch.dtype) -> Tensor:
        """The mean's gradient by each sample's loss; the wrapper averages over data ranks."""
        if not batch.uniform or torch.is_tensor(divisor):
            return (batch.weight * (self.plan.ranks / divisor)).to(dtype)
        key = (len(batch), divisor, dtype)
        if self._constant[0] != key:  # the same in nearly every step
            scale = self.plan.ranks / divisor
            self._constant = (
                key,
                torch.full((len(batch),), scale, dtype=dtype, device=batch.weight.device),
            )
        return self._constant[1]

    def _divisor(self, batch: Batch) -> Tensor | int:
        """What the sum of losses is divided by: the step's weight over all data ranks."""
        if not hasattr(self.task, "weight"):
            return batch.total
        total = masked_sum(self.task.weight(batch), batch.weight, batch.uniform)
        total = total.to(batch.weight.dtype)
        if self.plan.ranks > 1:
            dist.all_reduce(total)
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
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        if largest is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
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
            average_statistics(self.module, self.plan.ranks, None)


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


def parallelize(
    model: nn.Module, task: object, cfg: Config, layout: Layout, plan: BatchPlan, world: World
) -> Engine:
    """Put the model on its ranks: move it, wrap it, and seed what is drawn during training.

    Dropout differs between data ranks and repeats for the same seed and layout.
    """
    _set_torch(cfg)
    model = model.to(world.device)
    wrapped = model
    if layout.data_ranks > 1:
        wrapped = DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=cfg.parallel.find_unused_parameters,
        )
    data_rank = layout.data_rank(world.ranks.rank)
    torch.manual_seed((cfg.seed * 1_000_003 + 1 + data_rank) % 2**63)
    engine = Engine(model, wrapped, task, plan, data_rank, world, cfg)
    for helper in getattr(task, "helpers", {}).values():
        helper.to(world.device, engine.dtype).eval().requires_grad_(False)
    return engine


def _set_torch(cfg: Config) -> None:
    """Settings of the process; each run sets all of them, since a sweep may run several in one."""
    t = cfg.trainer
    torch.set_float32_matmul_precision(t.matmul_precision)
    torch.autograd.set_detect_anomaly(t.detect_anomaly)
    if t.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants it
    torch.use_deterministic_algorithms(t.deterministic)
