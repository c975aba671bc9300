"""Optimizers with their groups, and schedules against closed forms."""

import math
from pathlib import Path

import pytest
import timm
import torch
from jobs import composed, job_of, joined
from ranks import train
from timm.optim import param_groups_layer_decay
from torch import nn

from meshwork import optim
from meshwork.config import ConfigError
from meshwork.optim import Horizon, Schedule, group_options

OWN = ("model=timm", "model.name=own", "data._target_=toys.noise", "data.image_size=8")
MLP = (*OWN, "model._target_=toys.Mlp", "trainer.global_batch_size=32", "data.num_samples=320")


def small(name: str) -> nn.Module:
    return timm.create_model(name, num_classes=3)


# ---- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_resnet"])
def test_norms_biases_and_what_the_model_exempts_are_not_decayed(name: str) -> None:
    model = small(name)
    exempt = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    options = group_options(model, 0.05, None)
    assert options.keys() == {n for n, _ in model.named_parameters()}
    for n, p in model.named_parameters():
        decayed = p.ndim > 1 and not n.endswith("bias") and n not in exempt
        assert options[n] == (0.05 if decayed else 0.0, 1.0), n
    assert any(decay for decay, _ in options.values())


def test_a_plain_module_may_exempt_parameters_too() -> None:
    class Net(nn.Linear):
        def no_weight_decay(self) -> set[str]:
            return {"weight"}

    assert group_options(Net(2, 2), 0.1, None)["weight"] == (0.0, 1.0)
    assert group_options(nn.Linear(2, 2), 0.1, None)["weight"] == (0.1, 1.0)


@pytest.mark.parametrize("decay", [0.5, 0.9])
@pytest.mark.parametrize("name", ["test_vit", "test_convnext"])
def test_layer_decay_has_the_factors_of_timm(name: str, decay: float) -> None:
    model = small(name)
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    names = {id(p): n for n, p in model.named_parameters()}
    groups = param_groups_layer_decay(
        model, weight_decay=0.05, no_weight_decay_list=exempt, layer_decay=decay
    )
    wanted = {names[id(p)]: (g["weight_decay"], g["lr_scale"]) for g in groups for p in g["params"]}
    found = group_options(model, 0.05, decay)
    assert found == wanted
    factors = sorted({scale for _, scale in found.values()})
    n = len(factors)
    assert factors == pytest.approx([decay**i for i in reversed(range(n))]) and n > 3
    assert max(found, key=lambda k: found[k][1]).startswith("head")


def test_groups_reach_the_optimizer_and_the_schedule_keeps_their_ratio() -> None:
    given = ("model.args={patch_size: 8, depth: 2}", "optimizer.layer_decay=0.5")
    with joined() as world:
        job = job_of(composed(*given, "optimizer.lr=0.1", "scheduler.warmup_steps=10"), world)
        options = group_options(job.engine.module, 0.05, 0.5)
        names = {id(p): n for n, p in job.engine.module.named_parameters()}
        assert job.schedule.set(4) == pytest.approx(0.05)
        for group in job.optimizer.param_groups:
            for p in group["params"]:
                decay, scale = options[names[id(p)]]
                assert group["lr"] == pytest.approx(0.05 * scale)
                assert group["weight_decay"] == decay


def test_frozen_parameters_are_in_no_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert group_options(model, 0.1, None).keys() == {"1.weight", "1.bias"}


# ---- optimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lamb", "lion", "adan", "muon", "sgd", "adafactor"])
def test_timm_optimizers_by_name_take_a_step(name: str) -> None:
    """Of the size of the rate; no parameter stays behind."""
    given = ("model.args={patch_size: 8, depth: 1}", "optimizer=timm", f"optimizer.name={name}")
    with joined() as world:
        job = job_of(composed(*given, "optimizer.lr=1e-2"), world)
        before = {n: p.detach().clone() for n, p in job.engine.named_parameters()}
        torch.manual_seed(0)
        for p in job.engine.module.parameters():
            p.grad = torch.randn_like(p)
        job.engine.update(job.optimizer)
        for n, p in job.engine.named_parameters():
            moved = (p - before[n]).abs().mean().item()
            assert 1e-6 < moved < 0.1, (n, moved)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["optimizer=timm", "optimizer.name=lam"], "did you mean lamb"),
        (["optimizer=timm", "optimizer.name=kron"], "optimizer.name=kron draws random numbers"),
        (["optimizer=timm", "optimizer.name=adahessian"], "needs second derivatives"),
        (["optimizer=timm", "optimizer.name=fusedadam"], "cannot be built here"),
        (["optimizer.args.beta=1"], "optimizer.args.beta: torch.optim.AdamW takes no such"),
        (["optimizer.args.betaz=[0.9,0.9]"], "did you mean betas?"),
        (["optimizer=timm", "optimizer.name=lamb", "optimizer.args.bets=1"], "bets"),
        (["optimizer.args.betas=[0.9,2.0]"], "Invalid beta parameter"),
        (["optimizer._target_=torch.optim.Adamw"], "optimizer._target_=torch.optim.Adamw"),
        (["scheduler.args.decay=1"], "scheduler.args.decay: meshwork.optim.cosine takes no such"),
        (
            ["scheduler.warmup_steps=9", "trainer.max_steps=9"],
            "scheduler.warmup_steps=9 is 9 steps of a run of 9",
        ),
        (
            ["scheduler.warmup_epochs=41", "trainer.max_epochs=40"],
            "scheduler.warmup_epochs=41.0 is 902 steps of a run of",
        ),
        (["data.num_samples=8", "trainer.global_batch_size=9"], "8 training samples do not fill"),
    ],
)
def test_what_optimizer_and_schedule_refuse_is_said_before_ranks_start(
    given: list[str], said: str
) -> None:
    cfg = composed(*given)
    with joined() as world:
        world.control = None
        with pytest.raises(ConfigError) as error:
            job_of(cfg, world)
    assert said in str(error.value)


def test_the_sentence_comes_with_exit_code_2_and_no_folder(tmp_path: Path) -> None:
    ended = train(2, "optimizer.args.beta=1", cwd=tmp_path, timeout_s=40)
    assert ended.codes == [2, 2]
    assert ended.all_err.count("optimizer.args.beta") == 1
    assert list(tmp_path.iterdir()) == []


# ---- schedules -----------------------------------------------------------------------------------


def factors(*given: str, steps: int = 100, epoch_steps: int = 10) -> list[float]:
    """The factor of each step of a run."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = Schedule(composed(*given).scheduler, optimizer, Horizon(steps, epoch_steps))
    found = [schedule.set(step) for step in range(steps)]
    assert found == [schedule.factor(step) for step in range(steps)]
    return found


def test_cosine_is_half_a_cosine_after_a_linear_warm_up() -> None:
    found = factors("scheduler.warmup_steps=20")
    assert found[:20] == pytest.approx([(i + 1) / 20 for i in range(20)])
    wanted = [0.5 * (1 + math.cos(math.pi * i / 80)) for i in range(80)]
    assert found[20:] == pytest.approx(wanted)
    assert factors("scheduler.args.final=0.1", steps=4)[2] == pytest.approx(0.55)


def test_warm_up_may_be_given_in_epochs() -> None:
    assert factors("scheduler.warmup_epochs=1.5")[:16] == factors("scheduler.warmup_steps=15")[:16]


def test_wsd_holds_and_falls_linearly_over_the_last_tenth() -> None:
    found = factors("scheduler=wsd", "scheduler.warmup_steps=50", steps=150)
    assert found[:50] == pytest.approx([(i + 1) / 50 for i in range(50)])
    assert found[50:140] == pytest.approx([1.0] * 90)
    assert found[140:] == pytest.approx([1 - i / 10 for i in range(10)])
    half = factors("scheduler=wsd", "scheduler.args={decay: 0.5, final: 0.2}")
    assert half[75] == pytest.approx(0.6)


def test_multistep_drops_at_the_start_of_its_epochs() -> None:
    found = factors("scheduler=multistep", "scheduler.milestones=[4,7.5]")
    assert found == pytest.approx([1.0] * 40 + [0.1] * 35 + [0.01] * 25)
    gamma = factors("scheduler=multistep", "scheduler.milestones=[4]", "scheduler.args.gamma=0.5")
    assert gamma[39:41] == [1.0, 0.5]


def test_constant_is_constant() -> None:
    assert factors("scheduler=constant") == [1.0] * 100
    assert factors("scheduler=constant", "scheduler.warmup_steps=2")[:3] == [0.5, 1.0, 1.0]


def test_a_schedule_of_ones_own_names_what_it_needs() -> None:
    assert optim.multistep(epoch=3.0, milestones=[1, 2, 3]) == pytest.approx(1e-3)
    assert optim.cosine(progress=1.0) == pytest.approx(0.0)


def test_the_schedule_ticks_once_an_update_whatever_the_accumulation(tmp_path: Path) -> None:
    """And not per micro-batch or epoch: the rate of every logged step is the closed form's."""
    given = ["data.num_samples=160", "trainer.global_batch_size=32", "trainer.micro_batch_size=8"]
    given += ["trainer.max_epochs=2", "trainer.log_every_n_steps=1", "logger=none"]
    given += ["model.args={patch_size: 8, depth: 1}", "scheduler.warmup_steps=2", "data.workers=0"]
    ended = train(1, *given, "optimizer.lr=0.01", cwd=tmp_path)
    assert ended.codes == [0], ended.all_err
    rates = [line["train/lr"] for line in ended.lines("train/lr")]
    after = [0.005 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    assert rates == pytest.approx([0.005, 0.01, *after])


@pytest.mark.parametrize(
    ("n", "drop_last", "micro", "epoch_steps"),
    [(96, True, None, 2), (96, False, None, 3), (100, False, 8, 3), (80, False, None, 2)],
)
def test_an_epoch_has_the_steps_that_the_data_gives(
    n: int, drop_last: bool, micro: int | None, epoch_steps: int
) -> None:
    """With BatchNorm a rest smaller than a micro-batch gives none: 100 = 40 + 40 + 16 + 4."""
    model = "toys.Mlp" if micro is None else "toys.NormNet"
    given = [*OWN, f"model._target_={model}", "trainer.global_batch_size=40"]
    given += [f"data.num_samples={n}", f"data.drop_last={drop_last}"]
    given += [f"trainer.micro_batch_size={micro or 'null'}", "trainer.max_epochs=3"]
    with joined() as world:
        horizon = job_of(composed(*given), world).horizon
    assert horizon == Horizon(3 * epoch_steps, epoch_steps)
