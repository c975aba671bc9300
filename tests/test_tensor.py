"""Tensor parallelism: loss, every gradient and shares of weights against the whole model.

In fp64 from perturbed weights; all cases of a rank count share one process group.
"""

import os
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jobs import perturb
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from meshwork.parallel.fsdp import local, whole
from meshwork.parallel.tensor import split
from meshwork.parallel.tensor_plan import tensor_plan

VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 32}
SWIN = {"embed_dim": 32, "depths": (2, 1), "num_heads": (4, 8), "window_size": 4, "img_size": 64}

# {case: (architecture, arguments, tier)}
CASES: dict[str, tuple[str, dict, int]] = {
    "vit": ("vit_tiny_patch16_224", VIT, 2),
    "vit with normed queries": ("vit_tiny_patch16_224", VIT | {"qk_norm": True}, 2),
    "vit with normed heads": ("vit_tiny_patch16_224", VIT | {"scale_attn_norm": True}, 1),
    "vit with fused gates": (
        "vit_tiny_patch16_224",
        VIT | {"mlp_layer": timm.layers.SwiGLUPacked, "mlp_ratio": 4},
        2,
    ),
    "vit with relative positions": ("vit_relpos_base_patch16_224", VIT, 1),
    "eva": ("eva02_tiny_patch14_224", VIT | {"mlp_ratio": 3}, 2),
    "beit": ("beit_base_patch16_224", VIT, 2),
    "swin": ("swin_tiny_patch4_window7_224", SWIN, 2),
    "swin v2": ("swinv2_tiny_window8_256", SWIN, 2),
    "swin v2 cr": ("swinv2_cr_tiny_224", SWIN, 2),
    "cait": ("cait_xxs24_224", VIT | {"patch_size": 16, "img_size": 64}, 2),
    "convnext": ("test_convnext", {}, 1),
    "mlp": ("mlp", {}, 1),
}


class Mlp(nn.Module):
    """A fork's own: a plain MLP, one whose gates are fused, one with a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 8, 8)
        self.plain = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.gated, self.scaled = Gated(16, 32), Scaled(16, 32)
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image).flatten(2).transpose(1, 2)
        return self.head(self.scaled(self.gated(self.plain(x))).mean(1))


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.both, self.out = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, -1)
        return self.out(F.silu(gate) * value)


class Pair(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 16):
        super().__init__()
        self.a, self.b = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x)))


class Scaled(Pair):
    """All ranks use the scale for their part: its gradient is the sum of theirs."""

    def __init__(self, width: int, hidden: int):
        super().__init__(width, hidden)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.scale * F.relu(self.a(x)) ** 2)


def built(case: str) -> nn.Module:
    torch.manual_seed(0)
    name, args, _ = CASES[case]
    model = Mlp() if name == "mlp" else timm.create_model(name, num_classes=10, **args)
    perturb(model.double())
    return model


def image_of(case: str) -> Tensor:
    size = CASES[case][1].get("img_size", 32)
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1)).double()


def taken(model: nn.Module, image: Tensor) -> Tensor:
    torch.manual_seed(2)  # a network of positions in swin v2 cr drops, on all ranks alike
    loss = F.cross_entropy(model(image), torch.arange(len(image)))
    loss.backward()
    return loss.detach()


def scrambled(model: nn.Module, image: Tensor) -> float:
    """The loss after one split weight's rows lie the other way round."""
    parts = [p for n, p in model.named_parameters() if n.endswith("weight") and is_split(p)]
    with torch.no_grad():
        parts[-1].to_local().copy_(parts[-1].to_local().flip(0))
    return taken(model, image).item()


def is_split(p: Tensor) -> bool:
    return isinstance(p, DTensor) and p.placements[0].is_shard()


def away(a: Tensor, b: Tensor, scale: float) -> float:
    """||a - b|| / ||a||; a gradient that is zero but for rounding (a key's bias) counts as such."""
    return ((a - b).norm() / max(a.norm().item(), 1e-6 * scale)).item()


def compared(rank: int, cases: list[str]) -> dict[str, dict[str, Any]]:
    """What each case gives on this rank beside the whole model."""
    n = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    found = {case: one_case(case, mesh) for case in cases}
    dist.destroy_process_group()
    return found


def one_case(case: str, mesh: Any) -> dict[str, Any]:
    model, alone, image = built(case), built(case), image_of(case)
    plan = tensor_plan(model, (image,), mesh.size())
    names = [k for k, _ in model.named_parameters()]
    fused = split(model, plan, mesh)
    losses = taken(alone, image), taken(model, image)
    exact = {k: p.grad for k, p in alone.named_parameters()}
    mine = {k: p.grad for k, p in model.named_parameters()}
    scale = max(g.norm().item() for g in exact.values() if g is not None)
    full = {k: whole(g, fused.get(k, 1)) for k, g in mine.items() if g is not None}
    stored = {k: whole(p, fused.get(k, 1)) for k, p in model.named_parameters()}
    shares = {k: local(p).numel() / p.numel() for k, p in model.named_parameters() if is_split(p)}
    alike = {k: local(g).sum().item() for k, g in mine.items() if k not in shares and g is not None}
    return {
        "tier": plan.tier,
        "names": names == list(mine),
        "loss": (losses[0] - losses[1]).abs().item(),
        "missing": {k for k, g in exact.items() if g is not None} ^ full.keys(),
        "gradients": max(away(exact[k], full[k], scale) for k in full),
        "scrambled": abs(scrambled(model, image) - losses[0].item()),
        "weights": all(torch.equal(stored[k], p) for k, p in alone.named_parameters()),
        "shares": set(shares.values()),
        "whole": alike,
    }


@pytest.mark.parametrize("n", [2, 4])
def test_gradients_are_those_of_the_whole_model_and_split_weights_are_shares(n: int) -> None:
    cases = list(CASES)
    ranks = run_ranks(n, compared, cases, timeout_s=120)
    for case in cases:
        for found in (r[case] for r in ranks):
            assert found["tier"] == CASES[case][2], case
            assert found["names"] and found["weights"] and not found["missing"], case
            assert found["loss"] < 1e-12, case
            assert found["gradients"] < 1e-10, case
            assert found["scrambled"] > 1e-4, case
            assert found["shares"] == {1 / n}, case
            assert found["whole"] == ranks[0][case]["whole"], case  # equal bit for bit


# ---- with what else is done to a model -----------------------------------------------------------


def combined(rank: int) -> dict[str, float]:
    """Largest differences of gradients under recomputation, FSDP2 and bf16."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for case in ("vit", "eva", "beit", "swin v2"):
        image = image_of(case)
        alone = built(case)
        taken(alone, image)
        exact = {k: p.grad for k, p in alone.named_parameters() if p.grad is not None}
        for how in ("recomputed", "sharded", "bf16"):
            model = built(case)
            fused = split(model, tensor_plan(model, (image,), 2), mesh["tp"])
            blocks = [m for m in model.modules() if type(m).__name__.endswith("Block")]
            for block in blocks if how == "recomputed" else ():
                block.forward = recomputing(block.forward)
            if how == "sharded":
                for block in blocks:
                    fully_shard(block, mesh=mesh["dp"])
                fully_shard(model, mesh=mesh["dp"])
            if how == "bf16":
                model.float()
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "bf16"):
                taken(model, image.float() if how == "bf16" else image)
            full = {
                k: whole(p.grad, fused.get(k, 1)).double()
                for k, p in model.named_parameters()
                if p.grad is not None
            }
            found[f"{case} {how}"] = total_away(exact, full)
    dist.destroy_process_group()
    return found


def total_away(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """||a - b|| / ||a|| over all tensors."""
    assert a.keys() == b.keys()
    joined = [torch.cat([t.flatten() for _, t in sorted(d.items())]) for d in (a, b)]
    return ((joined[0] - joined[1]).norm() / joined[0].norm()).item()


def recomputing(forward: Any) -> Any:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def test_recomputation_sharding_and_bf16_go_with_it() -> None:
    for found in run_ranks(4, combined, timeout_s=120):
        for case, difference in found.items():
            assert difference < (0.05 if "bf16" in case else 1e-10), case
