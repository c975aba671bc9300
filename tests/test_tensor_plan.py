"""What tensor parallelism leaves whole or refuses, before any rank starts."""

import pytest
import torch
import torch.nn.functional as F
from test_tensor import Pair
from torch import Tensor, nn

from meshwork.config import ConfigError
from meshwork.parallel.tensor_plan import tensor_plan


class Body(nn.Module):
    """A body between two layers."""

    def __init__(self, *bodies: nn.Module):
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(8, 8), nn.Sequential(*bodies), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))


class InputBehind(Pair):
    """The input is at work behind the sum, where each rank's gradient of it is the whole one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x


class OtherInTraining(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).softmax(-1) if self.training else self.a(x).relu())


class ReadsWeight(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x).relu(), self.b.weight, self.b.bias)


class Dropping(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.5, self.training))


class Cached(Pair):
    """Keeps what it computed, until it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(self.a(x * self.cache.setdefault("scale", x.detach().mean())))


def plan_of(*bodies: nn.Module) -> list[str]:
    """Names of the regions among these bodies."""
    try:
        plan = tensor_plan(Body(*bodies), (torch.randn(2, 8),), 2)
    except ConfigError as e:
        assert "nothing to split" in str(e)
        return []
    return [r.name for r in plan.regions]


def test_what_computes_something_else_in_parts_is_left_whole() -> None:
    for kind in (InputBehind, OtherInTraining, ReadsWeight):
        assert plan_of(kind()) == [], kind
        assert plan_of(kind(), Pair()) == ["body.1"], kind
    layers = nn.Linear(8, 16), nn.Softmax(-1), nn.Linear(16, 8)
    alike = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
    assert plan_of(nn.Sequential(*alike), nn.Sequential(*layers)) == ["body.0"]


def test_weights_that_two_modules_share_stay_whole() -> None:
    one, other, third = Pair(), Pair(), Pair()
    other.a.weight = one.a.weight
    assert plan_of(one, other, third) == ["body.2"]
    other.a = third.a
    assert plan_of(one, other, third) == ["body.0"]
    assert plan_of(one, third, third) == ["body.0"]


def test_dropout_anywhere_inside_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"body\.0 of Body drops values inside"):
        tensor_plan(Body(Dropping()), (torch.randn(2, 8),), 2)
    plan = tensor_plan(Body(Dropping(), Pair()), (torch.randn(2, 8),), 2)
    assert plan.text == "1 MLPs split over 2 ranks; 1 with dropout left whole"


def test_planning_leaves_no_trace_in_the_model() -> None:
    model = Body(Cached(), Pair()).train()
    model.body[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    tensor_plan(model, (torch.randn(2, 8, generator=torch.Generator()),), 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.body[0].cache and model.body[0].training and not model.body[1].training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any("forward" in vars(m) or m._forward_hooks for m in model.modules())


def test_degrees_named_are_those_that_divide_all_that_is_split() -> None:
    def refusal(*bodies: nn.Module) -> str:
        with pytest.raises(ConfigError) as e:
            tensor_plan(Body(*bodies), (torch.randn(2, 8),), 4)
        return str(e.value)

    assert "the 6 hidden units of Body (body.0)" in refusal(Pair(8, 6), Pair(8, 12))
    assert refusal(Pair(8, 6), Pair(8, 12)).endswith("parallel.tp can be 1, 2, 3, 6")
    assert refusal(Pair(8, 9), Pair(8, 8)).endswith("splits all; use parallel=fsdp")
