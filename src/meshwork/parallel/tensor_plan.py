"""What tensor parallelism can split: found in any model, and proved on numbers.

Whether the parts of a region add up to its output is not read from its code but tried before
anything starts.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwork.config import ConfigError
from meshwork.parallel.tensor import Region, TensorPlan
from meshwork.parallel.tensor_trial import Seen, tried_out
from meshwork.parallel.units import Calls

QUERIES = {"qkv", "kv", "q", "k", "v", "q_proj", "k_proj", "v_proj", "query", "key", "value"}


def tensor_plan(
    model: nn.Module, inputs: tuple[Tensor, ...], tp: int, apart: Collection[str] = ()
) -> TensorPlan:
    """The regions of a model; raises ConfigError where tp does not divide them, or there are none.

    inputs: example inputs on the CPU. apart: modules that a pipeline takes apart. The model is left
    as it was.
    """
    kind = type(model).__name__
    seen = {n: call for n, call in _watch(model, inputs).items() if n not in apart}
    found = _proved(model, seen, tp)
    sizes = {r.name: size for r, size, _ in found}
    odd = {name: size for name, size in sizes.items() if size % tp}
    if odd:
        unit = "heads" if any(r.attention for r, *_ in found if r.name in odd) else "hidden units"
        fit = [
            d for d in range(1, min(sizes.values()) + 1) if not any(s % d for s in sizes.values())
        ]
        can = f"parallel.tp can be {', '.join(map(str, fit))}"
        raise ConfigError(
            f"parallel.tp={tp}: the {', '.join(map(str, sorted(set(odd.values()))))} {unit} of "
            f"{kind} ({next(iter(odd))}) cannot be split over {tp} ranks: "
            f"{can if len(fit) > 1 else 'no number of ranks splits all; use parallel=fsdp'}"
        )
    if not found:
        raise ConfigError(
            f"parallel.tp={tp}: {kind} has nothing to split: no MLP of linear layers and no "
            "attention by heads; use parallel=fsdp or parallel=pipeline"
        )
    dropping = [r for r, _, drops in found if drops]
    regions = [r for r, _, drops in found if not drops]
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


def _proved(model: nn.Module, seen: dict[str, Seen], tp: int) -> list[tuple[Region, int, bool]]:
    """What can be split: (region, size that tp has to divide, whether it drops values inside)."""
    candidates = {name: list(_candidates(model, name)) for name in seen}
    attends = {name for name, ways in candidates.items() if any(r.attention for r, _ in ways)}
    found: list[tuple[Region, int, bool]] = []
    tried: dict[tuple, tuple[bool, bool]] = {}  # modules that are alike are tried once
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name in sorted(seen, key=lambda n: (n not in attends, -n.count(".") - bool(n))):
        if any(_inside(r.name, name) or _inside(name, r.name) for r, *_ in found):
            continue  # overlaps one
        module = model.get_submodule(name)
        made, shapes = _made(module), _shapes(seen[name])
        for region, size in candidates[name]:
            degree = tp if size % tp == 0 else next(d for d in range(2, size + 1) if size % d == 0)
            own = [p for k, p in module.named_parameters() if _inside(k, region.last)]
            own += [p for k, p in module.named_parameters() if k in region.split]
            if any(uses[id(p)] > 1 for p in own):
                continue  # another module uses it too
            key = (made, region.last, repr(region.split), region.whole, shapes)
            if key not in tried:
                tried[key] = tried_out(module, region, seen[name], degree)
            holds, drops = tried[key]
            if holds or drops:
                found.append((region, size, drops))
                break
    return found


def _made(module: nn.Module) -> str:
    """What a module is made of, but for the values of its tensors."""
    kept = ("_parameters", "_buffers", "_modules")
    return repr(
        [
            (name, type(m), {k: v for k, v in vars(m).items() if k not in kept})
            for name, m in module.named_modules()
        ]
    )


def _inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}." if other else "")


def _watch(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Seen]:
    """Calls of the modules that own two or more linear layers, in one run of the model."""
    seen: dict[str, Seen] = {}

    def hook(name: str) -> Callable:
        def note(_: nn.Module, args: tuple, kwargs: dict) -> None:
            if name in seen:
                seen[name].calls += 1
            else:
                seen[name] = Seen(args, kwargs)

        return note

    names = [n for n, m in model.named_modules() if len(_linears(m)) >= 2]
    hooks = [
        model.get_submodule(n).register_forward_pre_hook(hook(n), with_kwargs=True) for n in names
    ]
    calls = Calls(model, names)
    try:
        calls.run(model, inputs)
    finally:
        for handle in hooks:
            handle.remove()
    owners = [id(m) for _, m in model.named_modules(remove_duplicate=False)]
    return {
        n: s
        for n, s in seen.items()
        if s.calls == 1
        and n not in calls.read  # what another module reads stays whole
        and owners.count(id(model.get_submodule(n))) == 1
        and _plain(s)
    }


def _plain(seen: Seen) -> bool:
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
        if width == 1:
            continue
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


def _shapes(seen: Seen) -> tuple:
    return tuple(
        tuple(t.shape) if torch.is_tensor(t) else repr(t)
        for t in tree_leaves((seen.args, seen.kwargs))
    )
