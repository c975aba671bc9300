"""Whether a region can be split, tried on numbers before any rank starts.

Each rank's part runs in this process, in float64, as `tensor.split` would have it run; outputs and
gradients have to be those of the whole.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map

from meshwork.models.unchanged import unchanged
from meshwork.parallel.tensor import Region, narrow, part, set_sizes


@dataclass
class Seen:
    """A call of a module in a run of the model."""

    args: tuple
    kwargs: dict
    calls: int = 1


@dataclass
class _Run:
    """output: [...] of the module. summed: what its last layer gave, which ranks sum.

    gradients: {tensor of the module, or "input": of the output projected on a fixed direction}.
    """

    output: Tensor
    summed: Tensor
    gradients: dict[str, Tensor]


def tried_out(module: nn.Module, region: Region, seen: Seen, tp: int) -> tuple[bool, bool]:
    """(Whether the parts compute what the whole does, whether only dropout keeps them from it)."""
    try:
        if not _holds(module, region, seen, tp, training=False):
            return False, False
        if _holds(module, region, seen, tp, training=True):
            return True, False
        one, other = (_run(module, region, seen, training=True, seed=seed) for seed in (0, 1))
        return False, not torch.equal(one.summed, other.summed)
    except Exception:  # whatever a forward with other sizes runs into
        return False, False


def _holds(module: nn.Module, region: Region, seen: Seen, tp: int, training: bool) -> bool:
    """Whether the outputs of the parts, in training their gradients too, are those of the whole.

    As on the ranks, each part goes on with the sum where its last layer gave its own share.
    """
    run = partial(_run, module, region, seen, training)
    full = run(graded=training)
    total = sum(run(rank=(rank, tp)).summed for rank in range(tp))
    ran = [run(rank=(rank, tp), total=total, graded=training) for rank in range(tp)]
    pairs = [(full.output, r.output) for r in ran]
    for key, gradient in full.gradients.items():
        mine = [r.gradients[key] for r in ran]
        if key in region.split:
            pairs += [(part(gradient, *region.split[key], r, tp), g) for r, g in enumerate(mine)]
        elif key == "input" or key in region.whole:
            pairs.append((gradient, sum(mine)))
        else:
            pairs += [(gradient, g) for g in mine]
    # A gradient that is zero but for rounding (a key's bias) has no relative difference.
    least = 1e-6 * max((g.norm().item() for g in full.gradients.values()), default=0.0)
    return all(
        a.shape == b.shape and (a - b).norm().item() <= 1e-9 * max(a.norm().item(), least)
        for a, b in pairs
    )


def _run(
    module: nn.Module,
    region: Region,
    seen: Seen,
    training: bool,
    rank: tuple[int, int] = (0, 1),
    total: Tensor | None = None,
    graded: bool = False,
    seed: int = 0,
) -> _Run:
    """The module on fixed random numbers in float64, as this one of so many ranks runs it.

    total: what the last layers of all ranks give together. seed: of what the forward draws.
    """
    args, kwargs, values = _drawn(module, region, seen, rank)
    probes = {"input": args[0], **{k: values[k] for k, _ in module.named_parameters()}}
    for tensor in probes.values():
        tensor.requires_grad_(graded)
    given: list[Tensor] = []

    def last(_: nn.Module, __: tuple, output: Tensor) -> Tensor:
        given.append(output.detach())
        return output if total is None else output + (total - output.detach())

    with unchanged(module), torch.random.fork_rng(devices=[]), torch.set_grad_enabled(graded):
        torch.manual_seed(seed)
        module.train(training)
        set_sizes(module, region, rank[1])
        x = narrow(args[0].clone(), region, rank[1])
        hook = module.get_submodule(region.last).register_forward_hook(last)
        try:
            with _reparametrize_module(module, values):
                output = module(x, *args[1:], **kwargs)
        finally:
            hook.remove()
        (summed,) = given  # nothing where a forward reads the weight of its last layer itself
        found = ()
        if graded:
            onto = torch.arange(output.numel(), dtype=torch.float64).view(output.shape)
            options = {"allow_unused": True, "materialize_grads": True}
            found = torch.autograd.grad(output, list(probes.values()), onto.cos(), **options)
    return _Run(output, summed, dict(zip(probes, found, strict=False)))


def _drawn(
    module: nn.Module, region: Region, seen: Seen, rank: tuple[int, int]
) -> tuple[tuple, dict, dict[str, Tensor]]:
    """(args, kwargs, this rank's tensors of the module): random where they are no integers."""
    g = torch.Generator().manual_seed(0)

    def drawn(value: Any, scale: float = 1.0) -> Any:
        if not torch.is_tensor(value):
            return value
        if not value.is_floating_point():
            return value.clone()
        return scale * torch.randn(value.shape, generator=g, dtype=torch.float64)

    args, kwargs = tree_map(drawn, (seen.args, seen.kwargs))
    tensors = [*module.named_parameters(), *module.named_buffers()]
    values = {k: drawn(t, 0.2) for k, t in tensors}
    values |= {k: part(values[k], *how, *rank) for k, how in region.split.items()}
    if rank[0] and f"{region.last}.bias" in values:  # added once
        values[f"{region.last}.bias"].zero_()
    return args, kwargs, values
