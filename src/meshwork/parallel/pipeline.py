"""Pipeline parallelism: into which stages a model is cut."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from meshwork.config import ConfigError
from meshwork.mesh import STAGES_PER_RANK
from meshwork.parallel.cuts import Cuts, facts, size
from meshwork.parallel.stage import Stage
from meshwork.parallel.trace import Untraceable, trace
from meshwork.parallel.units import stepped_into

BYTE = 50  # operations that take as long as sending one byte
REFINE = 12  # units that may be taken apart in search of a balance


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut.

    starts: the leaf each stage but the first begins with. parts: the stages. work: share of each.
    crossing: bytes of one micro-batch that leave each but the last.
    """

    starts: tuple[str, ...]
    parts: tuple[Stage, ...]
    work: tuple[float, ...]
    crossing: tuple[int, ...]
    schedule: str

    def rank_of(self, stage: int, pp: int) -> int:
        """The pipeline rank that holds a stage: in turn, or there and back (V schedules)."""
        there, back = divmod(stage, pp)
        return pp - 1 - back if self.schedule == "ZBVZeroBubble" and there % 2 else back

    def of_rank(self, rank: int, pp: int) -> list[int]:
        """The stages of a pipeline rank."""
        return [s for s in range(len(self.parts)) if self.rank_of(s, pp) == rank]


def stage_plan(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    n_stages: int,
    schedule: str,
    asked: list[str] | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    keep: Collection[str] = (),
) -> StagePlan:
    """Cut a model into stages of balanced work, with few bytes between them.

    inputs: of one micro-batch. asked: names of the modules that start a stage (but the first).
    keep: names of modules that are not taken apart.
    Raises ConfigError where the model cannot be traced or has too few places to cut.
    """
    kind, into = type(model).__name__, set(stepped_into(model))
    tried = set(keep)
    found = None
    while True:
        try:
            train, evaluate = (trace(model, into, inputs, t, autocast) for t in (True, False))
        except Untraceable as e:
            if found is None:
                raise ConfigError(
                    f"parallel.pp: {kind} cannot be cut into stages, its forward cannot be traced "
                    f"({e}): use parallel=fsdp"
                ) from e
            break
        cuts = Cuts(model, train), Cuts(model, evaluate)
        places = _places(*cuts)
        best = _balanced(cuts[0], places, n_stages) if asked is None else _asked(asked, places)
        if best is not None and (found is None or best[0] < found[0]):
            found = (*best, cuts, places)
        largest = _too_large(model, cuts[0], tried, n_stages)
        enough = found is not None and found[0] < 1.1 / n_stages
        if asked is not None or enough or largest is None or len(tried - set(keep)) >= REFINE:
            break
        tried.add(largest)
        into.add(largest)
    if found is None:
        most = len(places) + 1
        raise ConfigError(
            f"parallel.pp: {kind} has {most} parts that can be stages, {n_stages} are asked for "
            f"({schedule}): use parallel.pp={max(1, most // STAGES_PER_RANK[schedule])} or less, "
            "or parallel=fsdp"
        )
    return _plan(model, found, schedule)


def _places(train: Cuts, evaluate: Cuts) -> dict[str, tuple[int, list[fx.Node]]]:
    """Leaves before which both graphs may be cut alike: {name: (node, what crosses)}."""
    found = {}
    for name, i in sorted(train.first.items(), key=lambda item: item[1]):
        if i == 0 or name not in evaluate.first:
            continue
        a, b = train.crossing(i), evaluate.crossing(evaluate.first[name])
        differ = a is None or b is None or not a or facts(a) != facts(b)
        if not differ and all(dtype.is_floating_point for _, dtype in facts(a)):
            found[name] = (i, a)
    return found


def _balanced(
    cuts: Cuts, places: dict[str, tuple[int, list[fx.Node]]], n_stages: int
) -> tuple[float, list[str]] | None:
    """(largest share, starts): the cuts whose heaviest stage is lightest, bytes counted as work."""
    names = list(places)
    if len(names) < n_stages - 1:
        return None
    work = torch.tensor(cuts.work(), dtype=torch.float64).cumsum(0).tolist()
    ends = [work[places[n][0] - 1] for n in names] + [work[-1]]
    sent = [BYTE * size(places[n][1]) for n in names] + [0]
    begins = [0.0, *ends[:-1]]
    pays = [0, *sent[:-1]]
    # best[j]: (cost, total of bytes, cuts) of the parts up to the j-th end in k stages
    best = [(ends[j] + sent[j], sent[j], ()) for j in range(len(ends))]
    for _ in range(n_stages - 1):
        new: list[Any] = [None] * len(ends)
        for j in range(len(ends)):
            options = (
                (
                    max(best[i][0], ends[j] - begins[i + 1] + pays[i + 1] + sent[j]),
                    best[i][1] + sent[j],
                    (*best[i][2], i),
                )
                for i in range(j)
                if best[i] is not None
            )
            new[j] = min(options, default=None)
        best = new
    cost, _, chosen = best[-1]
    return cost / work[-1], [names[i] for i in chosen]


def _asked(asked: list[str], places: dict) -> tuple[float, list[str]]:
    wrong = [name for name in asked if name not in places]
    if wrong:
        raise ConfigError(
            f"parallel.stages: {', '.join(wrong)} cannot start a stage: choose among "
            f"{', '.join(places)}"
        )
    return 0.0, sorted(asked, key=lambda name: places[name][0])


def _too_large(model: nn.Module, cuts: Cuts, tried: set[str], n_stages: int) -> str | None:
    """The heaviest leaf that has children and is more than half of a fair share."""
    total = sum(cuts.work())
    heavy = {
        n.target: n.meta["work"]
        for n in cuts.nodes
        if n.op == "call_module"
        and n.target not in tried
        and n.meta["work"] > 0.5 * total / n_stages
        and any(True for _ in model.get_submodule(n.target).children())
    }
    return max(heavy, key=heavy.get, default=None)


def _plan(model: nn.Module, found: tuple, schedule: str) -> StagePlan:
    _, starts, (train, evaluate), places = found
    bounds = [0, *(places[s][0] for s in starts), len(train.nodes)]
    work, total = train.work(), sum(train.work())
    return StagePlan(
        tuple(starts),
        tuple(Stage(model, i, train, evaluate, starts) for i in range(len(starts) + 1)),
        tuple(sum(work[a:b]) / total for a, b in pairwise(bounds)),
        tuple(size(places[s][1]) for s in starts),
        schedule,
    )
