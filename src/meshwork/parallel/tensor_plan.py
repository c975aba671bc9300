"""What tensor parallelism can split: found in any model, and proved on numbers.

Whether the parts of a region add up to its output is not read from its code but tried before
anything starts.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves, tree_map

from meshwork.config import ConfigError
from meshwork.parallel.tensor import Region, TensorPlan, narrow, part, set_sizes

QUERIES = {"qkv", "kv", "q", "k", "v", "q_proj", "k_proj", "v_proj", "query", "key", "value"}


@dataclass
class _Seen:
    """A call of a module in a run of the model."""

    args: tuple
    kwargs: dict
    calls: int = 1


def tensor_plan(
    model: nn.Module, inputs: tuple[Tensor, ...], tp: int, apart: Collection[str] = ()
) -> TensorPlan:
    """The regions of a model; raises ConfigError where tp does not divide them, or there are none.

    inputs: example inputs on the CPU. apart: modules that a pipeline takes apart. The model is left
    as it was.
    """
    kind = type(model).__name__
    seen = _watch(model, inputs)
    seen = {n: s for n, s in seen.items() if n not in apart}
    candidates = [c for name in seen for c in _candidates(model, name)]
    regions: list[Region] = []
    proved: dict[tuple, Region | None] = {}
    odd: dict[str, int] = {}  # sizes that tp does not divide
    attends = {c[0].name for c in candidates if c[0].attention}
    for name in sorted(seen, key=lambda n: (n not in attends, -n.count(".") - bool(n))):
        if any(_inside(r.name, name) or _inside(name, r.name) for r in regions):
            continue  # overlaps one
        module = model.get_submodule(name)
        for region, size in (c for c in candidates if c[0].name == name):
            key = (type(module), region.last, repr(region.split), _shapes(seen[name]), size)
            if key not in proved:
                divisor = next((d for d in range(2, size + 1) if size % d == 0), 1)
                degree = tp if size % tp == 0 else divisor
                holds = degree > 1 and _holds(module, region, seen[name], degree)
                proved[key] = region if holds else None
            if proved[key] is not None:
                regions.append(region)
                if size % tp:
                    odd[name] = size
                break
    if odd:
        unit = "heads" if any(r.attention for r in regions if r.name in odd) else "hidden units"
        sizes = sorted(set(odd.values()))
        fit = [d for d in range(1, min(sizes) + 1) if all(s % d == 0 for s in sizes)]
        raise ConfigError(
            f"parallel.tp={tp}: the {', '.join(map(str, sizes))} {unit} of {kind} "
            f"({next(iter(odd))}) cannot be split over {tp} ranks: parallel.tp can be "
            f"{', '.join(map(str, fit))}"
        )
    if not regions:
        raise ConfigError(
            f"parallel.tp={tp}: {kind} has nothing to split: no MLP of linear layers and no "
            "attention by heads; use parallel=fsdp or parallel=pipeline"
        )
    dropping = [r for r in regions if _drops(model.get_submodule(r.name), r)]
    regions = [r for r in regions if r not in dropping]
    if not regions:
        raise ConfigError(
            f"parallel.tp={tp}: {dropping[0].name} of {kind} drops values inside of what is split, "
            "where all ranks would drop alike: set the rate to 0 (model.args.attn_drop_rate=0, "
            "model.args.proj_drop_rate=0), or use parallel=fsdp"
        )
    n_attention = sum(r.attention for r in regions)
    n_mlp = len(regions) - n_attention
    text = " and ".join(
        f"{n} {what}" for n, what in ((n_attention, "attentions"), (n_mlp, "MLPs")) if n
    )
    text += f" split over {tp} ranks"
    text += f"; {len(dropping)} with dropout left whole" if dropping else ""
    return TensorPlan(tuple(regions), 2 if n_attention else 1, text)


def _inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}." if other else "")


def _watch(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, _Seen]:
    """Calls of the modules that own two or more linear layers, in one run of the model."""
    seen: dict[str, _Seen] = {}

    def hook(name: str) -> Callable:
        def note(_: nn.Module, args: tuple, kwargs: dict) -> None:
            if name in seen:
                seen[name].calls += 1
            else:
                seen[name] = _Seen(args, kwargs)

        return note

    names = [n for n, m in model.named_modules() if len(_linears(m)) >= 2]
    hooks = [
        model.get_submodule(n).register_forward_pre_hook(hook(n), with_kwargs=True) for n in names
    ]
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        model(*inputs)
    finally:
        for handle in hooks:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    owners = [id(m) for _, m in model.named_modules(remove_duplicate=False)]
    return {
        n: s
        for n, s in seen.items()
        if s.calls == 1 and owners.count(id(model.get_submodule(n))) == 1 and _plain(s)
    }


def _plain(seen: _Seen) -> bool:
    """Whether a module is called with one tensor that may need a gradient, and constants."""
    others = tree_leaves((seen.args[1:], seen.kwargs))
    needs = any(torch.is_tensor(t) and t.requires_grad for t in others)
    return bool(seen.args) and torch.is_tensor(seen.args[0]) and not needs


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in module.named_children() if type(m) is nn.Linear}


def _candidates(model: nn.Module, name: str) -> Iterator[tuple[Region, int]]:
    """Ways in which a module might be split, with the size that tp has to divide."""
    module = model.get_submodule(name)
    linears = _linears(module)
    heads = getattr(module, "num_heads", None)
    if type(heads) is int and "proj" in linears and heads > 1:
        width = linears["proj"].in_features
        first = [n for n in linears if n in QUERIES or n == "gate"]
        if all(linears[n].out_features % width == 0 for n in first):
            yield _region(module, name, "proj", first, width, heads), heads
        return
    for last in reversed(linears):
        width = linears[last].in_features
        fits = [n for n in linears if n != last and linears[n].out_features in (width, 2 * width)]
        for first in (fits, *([n] for n in fits)):
            if first:
                yield _region(module, name, last, first, width, None), width


def _region(
    module: nn.Module, name: str, last: str, first: list[str], width: int, heads: int | None
) -> Region:
    split, whole = {f"{last}.weight": (1, 1)}, []
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    for key, tensor in tensors.items():
        owner = key.rpartition(".")[0]
        if owner == last:
            continue
        per_head = [d for d, n in enumerate(tensor.shape) if n == heads]
        normed = "norm" in key
        if owner in first:
            split[key] = (0, tensor.shape[0] // width)
        elif heads and key in ("q_bias", "k_bias", "v_bias") and len(tensor) == width:
            split[key] = (0, 1)
        elif heads and len(per_head) == 1 and not normed and tensor.is_floating_point():
            split[key] = (per_head[0], 1)
        elif isinstance(tensor, nn.Parameter):
            whole.append(key)
    return Region(name, last, split, tuple(whole), heads is not None)


def _shapes(seen: _Seen) -> tuple:
    return tuple(
        tuple(t.shape) if torch.is_tensor(t) else repr(t)
        for t in tree_leaves((seen.args, seen.kwargs))
    )


@torch.enable_grad()
def _holds(module: nn.Module, region: Region, seen: _Seen, tp: int) -> bool:
    """Whether the parts' outputs add up to the whole one on random numbers, in float64.

    Also whether no whole parameter is at work behind the last layer, where its gradient would be
    whole on each rank and not be summed.
    """
    g = torch.Generator().manual_seed(0)

    def drawn(t: Any, scale: float = 1.0) -> Any:
        if not torch.is_tensor(t) or not t.is_floating_point():
            return t
        return scale * torch.randn(t.shape, generator=g, dtype=torch.float64)

    args, kwargs = tree_map(drawn, (seen.args, seen.kwargs))
    owned = [*module.named_parameters(), *module.named_buffers()]
    values = {k: drawn(t, 0.2) for k, t in owned}
    probes = {k: values[k].requires_grad_() for k in region.whole}
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with _reparametrize_module(module, values):
            full = module(*args, **kwargs)
        total = 0
        for rank in range(tp):
            mine = {k: part(values[k], *how, rank, tp) for k, how in region.split.items()}
            if rank and f"{region.last}.bias" in values:
                mine[f"{region.last}.bias"] = torch.zeros_like(values[f"{region.last}.bias"])
            with _local_sizes(module, region, tp), _reparametrize_module(module, values | mine):
                total = total + module(narrow(args[0], region, tp), *args[1:], **kwargs)
        with _reparametrize_module(module, values):
            behind = _behind(module, region, args, kwargs)
        later = (
            torch.autograd.grad(behind, list(probes.values()), allow_unused=True)
            if (probes and behind.requires_grad)
            else ()
        )
    except Exception:  # whatever a forward with other sizes runs into
        return False
    finally:
        for m, mode in modes.items():
            m.training = mode
    same = torch.is_tensor(full) and total.shape == full.shape
    return (
        same and bool((total - full).norm() <= 1e-9 * full.norm()) and all(x is None for x in later)
    )


def _behind(module: nn.Module, region: Region, args: tuple, kwargs: dict) -> Tensor:
    """The sum of the output, as it depends on what happens behind the last layer alone."""
    last = module.get_submodule(region.last)
    hook = last.register_forward_hook(lambda *call: call[2].detach())
    try:
        return module(*args, **kwargs).sum()
    finally:
        hook.remove()


@contextmanager
def _local_sizes(module: nn.Module, region: Region, tp: int) -> Iterator[None]:
    before = set_sizes(module, region, tp)
    try:
        yield
    finally:
        vars(module).update(before)


def _drops(module: nn.Module, region: Region) -> bool:
    """Whether something is dropped inside of what is split: the ranks would drop alike."""
    for name, child in module.named_children():
        if name == region.last:
            break
        if isinstance(child, nn.Dropout) and child.p > 0:
            return True
    return False
