"""The engine of a pipeline: torch's schedules over the stages that this rank holds."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils._pytree import tree_leaves

from meshwork.batch import Batch, map_tensors
from meshwork.mesh import STAGES_PER_RANK, Layout
from meshwork.parallel.engine import Engine
from meshwork.parallel.pipeline import StagePlan
from meshwork.parallel.stage import Stage


class PipelineEngine(Engine):
    """A model in stages; the loss is computed where the last one is."""

    def connect(self, stages: StagePlan, layout: Layout) -> None:
        """Make torch's stages and schedule; called once the parts are as they stay."""
        n, device, group = len(stages.parts), self.world.device, self.mesh.get_group("pp")
        self.pp_group = group
        ranks = (stages.rank_of(i, layout.pp) for i in range(n))
        self.holder = [dist.get_global_rank(group, r) for r in ranks]  # of each stage
        self.counts = self.counts and any(p.last for p in self.parts)
        self.first = any(p.number == 0 for p in self.parts)
        self._names: list[str] | None = None
        made = []
        for part in self.parts:
            ins, outs = part.metas[True]
            args = {"input_args": tuple(ins), "output_args": tuple(outs)}
            part.register_forward_pre_hook(self._begin_micro)
            part.forwards = {k: self._cast(f) for k, f in part.forwards.items()}
            made.append(PipelineStage(part, part.number, n, device, group=group, **args))
        name = stages.schedule
        kind = getattr(schedules, f"Schedule{name}")
        single = STAGES_PER_RANK[name] == 1
        given = {"loss_fn": self._loss_of, "scale_grads": False}
        self.schedule = kind(made[0] if single else made, self.plan.n_micro, **given)

    def _cast(self, forward: Callable) -> Callable:
        def run(*args: Any) -> Any:
            with self.autocast():
                return forward(*args)

        return run

    def _begin_micro(self, part: Stage, _: tuple) -> None:
        """Micro-batches reach each stage in order: the dummies come last."""
        if part.training and self._statistics is not None:
            self._statistics.skip = self._done.get(part, 0) >= self._n_real
            self._done[part] = self._done.get(part, 0) + 1

    def train(self, mode: bool = True) -> None:
        for part in self.parts[1:]:
            part.train(mode)
        super().train(mode)

    def _run(self, micro_batches: list[Batch], n_real: int, divisor: Tensor | int) -> dict:
        self._n_real, self._done = n_real, {}
        self._divisor_now, self._found = divisor, []
        self.schedule.step(
            arg_mbs=[m.inputs for m in micro_batches] if self.first else None,
            target_mbs=micro_batches,
        )
        if self._names is None:
            self._names = self._agree(list(self._found[0]) if self._found else None)
        if not self._found:
            zero = torch.zeros((), dtype=self.dtype, device=self.world.device)
            return dict.fromkeys(self._names, zero)
        return {k: torch.stack([f[k] for f in self._found]).sum() for k in self._found[0]}

    def _agree(self, names: list[str] | None) -> list[str]:
        """The names of the loss's parts, which only the last stage knows."""
        box = [names]
        dist.broadcast_object_list(box, self.holder[-1], group=self.pp_group)
        return box[0]

    def _loss_of(self, output: Any, batch: Batch) -> Tensor:
        """What the schedule goes back from."""
        with self.autocast():
            loss, parts = self._loss(output, batch)
        self._found.append(self._shares(loss, parts, batch, self._divisor_now))
        gradient = self._gradient(batch, self._divisor_now, loss.dtype)
        return torch.where(batch.weight > 0, loss * gradient, 0).sum()

    @torch.no_grad()
    def predict(self, batch: Batch) -> object:
        """Output of the model where the last stage is, elsewhere None.

        Forward alone, stage after stage, each over all micro-batches: what torch's schedules do in
        evaluation, and for those whose stages lie there and back as well.
        """
        passed: list[Any] = [m.inputs for m in batch.split(self.plan.micro)]
        sends = []
        for part in self.parts:
            n, me = part.number, self.world.ranks.rank
            remote = n > 0 and self.holder[n - 1] != me
            outputs = []
            for inputs in passed:
                out = part(*(self._received(part) if remote else inputs))
                if not part.last and self.holder[n + 1] != me:
                    to = {"dst": self.holder[n + 1], "group": self.pp_group}
                    sends += [(dist.isend(t, **to), t) for t in out]
                outputs.append(out)
            passed = outputs
        for handle, _ in sends:
            handle.wait()
        return _joined(passed) if self.parts[-1].last else None

    def _received(self, part: Stage) -> list[Tensor]:
        ins = part.metas[False][0]
        values = [torch.empty_like(v, device=self.world.device) for v in ins]
        for value in values:
            dist.recv(value, src=self.holder[part.number - 1], group=self.pp_group)
        return values


def _joined(outputs: list[Any]) -> Any:
    """Outputs of micro-batches as one of the whole batch."""
    pieces = zip(*(tree_leaves(o) for o in outputs), strict=True)
    return map_tensors(lambda _: torch.cat(next(pieces)), outputs[0])
