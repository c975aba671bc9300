"""Before any rank starts: what a model is split into, and what is refused with what would work."""

import re
from functools import partial

import pytest
import timm
import torch
import toys
from jobs import composed
from torch import nn

from meshwork import build
from meshwork.config import ConfigError
from meshwork.mesh import Layout
from meshwork.overview import bubble_of
from meshwork.parallel.check import check
from meshwork.parallel.pipeline import stage_plan
from meshwork.parallel.tensor_plan import tensor_plan
from meshwork.parallel.units import alone, units, wrappable


def planned(world_size: int, *overrides: str):
    """BatchPlan and Split of a command on so many ranks."""
    cfg = composed(*overrides)
    layout = Layout.resolve(cfg.parallel, world_size)
    data = build.build_data(cfg)
    task, model = build.build_task(cfg, data), build.build_model(cfg, data)
    inputs = partial(build.example_inputs, cfg, data, model, task)
    return check(cfg, model, task, layout, torch.device("cpu"), inputs)


def refused(world_size: int, *overrides: str) -> str:
    with pytest.raises(ConfigError) as e:
        planned(world_size, *overrides)
    return str(e.value)


def timm_net(name: str, **args) -> tuple[nn.Module, tuple]:
    model = timm.create_model(name, num_classes=10, **args)
    return model, (torch.randn(2, *model.pretrained_cfg["input_size"]),)


# ---- units ---------------------------------------------------------------------------------------


def test_units_are_the_blocks_and_what_stands_beside_them() -> None:
    assert list(units(timm.create_model("test_vit"))) == [
        "patch_embed",
        *(f"blocks.{i}" for i in range(6)),
        "norm",
        "head",
    ]
    names = list(units(timm.create_model("resnet18")))
    assert {"conv1", "bn1", "fc"} <= set(names)
    assert [n for n in names if n.startswith("layer")] == [
        f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)
    ]


def test_a_module_whose_weight_another_reads_is_no_unit_of_its_own() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.tied, self.c = nn.Linear(4, 4), nn.Linear(4, 4)
            self.tied.weight = self.a.weight

        def forward(self, x):
            x = nn.functional.linear(self.tied(self.a(x)), self.b.weight)
            return self.c(x) * self.c.weight.mean()

    model = Reads()
    assert alone(model, units(model)) == ["b", "c"]
    assert wrappable(model, (torch.randn(2, 4),)) == ()  # b is not called, c is read besides


# ---- pipelines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["test_vit", "resnet18", "test_convnext", "test_efficientnet"])
@pytest.mark.parametrize("n", [2, 4])
def test_stages_give_the_model_s_output_and_hold_each_parameter_once(name: str, n: int) -> None:
    model, inputs = timm_net(name)
    plan = stage_plan(model, inputs, n, "1F1B")
    stages = plan.parts
    model.eval()
    values = inputs
    for stage in stages:
        values = stage.eval()(*values)
    assert torch.equal(values, model(*inputs))
    names = [k for stage in stages for k, _ in stage.named_parameters()]
    assert sorted(names) == sorted(k for k, _ in model.named_parameters())
    state = {k for stage in stages for k in stage.state_dict()}
    assert state == model.state_dict().keys()
    assert sum(plan.work) == pytest.approx(1)
    assert max(plan.work) < 1.9 / n or name == "test_efficientnet"  # its stem is half of it


def test_a_forward_on_shapes_leaves_the_model_as_it_was() -> None:
    model, inputs = timm_net("resnet18")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    stage_plan(model, inputs, 2, "1F1B")
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_stages_start_where_a_person_says() -> None:
    _, split = planned(2, "parallel=pipeline", "parallel.stages=[blocks.1]")
    assert split.stages.starts == ("blocks.1",)
    text = refused(2, "parallel=pipeline", "parallel.stages=[blocks.77]")
    assert "parallel.stages: blocks.77 cannot start a stage: choose among" in text
    assert "name 1" in refused(2, "parallel=pipeline", "parallel.stages=[blocks.1,blocks.2]")


def test_interleaved_schedules_have_two_stages_a_rank_and_v_schedules_come_back() -> None:
    _, split = planned(2, "parallel=pipeline", "parallel.schedule=Interleaved1F1B")
    assert [split.stages.of_rank(r, 2) for r in (0, 1)] == [[0, 2], [1, 3]]
    _, split = planned(2, "parallel=pipeline", "parallel.schedule=ZBVZeroBubble")
    assert [split.stages.of_rank(r, 2) for r in (0, 1)] == [[0, 3], [1, 2]]


def test_a_pipeline_gets_four_micro_batches_a_rank_unless_told_otherwise() -> None:
    plan, _ = planned(2, "parallel=pipeline", "trainer.global_batch_size=64")
    assert (plan.n_micro, plan.micro, plan.evaluated) == (8, 8, 64)
    small = ("trainer.global_batch_size=64", "trainer.micro_batch_size=64")
    assert refused(2, "parallel=pipeline", *small).endswith(
        "set trainer.micro_batch_size=32 or less"
    )


def test_too_many_stages_are_refused_with_how_many_there_can_be() -> None:
    own = ["data._target_=toys.noise", "data.image_size=8", "model=timm", "model.name=own"]
    text = refused(8, "parallel=pipeline", *own, "model._target_=toys.Mlp")
    assert "Mlp has 2 parts that can be stages, 8 are asked for" in text
    assert "parallel.pp=2 or less" in text


def test_the_bubble_follows_the_schedule_s_formula() -> None:
    assert bubble_of("1F1B", 4, 8) == pytest.approx(3 / 11)
    assert bubble_of("Interleaved1F1B", 4, 8) == pytest.approx(3 / 19)
    assert bubble_of("ZBVZeroBubble", 4, 8) == 0


# ---- tensor --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "tier", "text"),
    [
        ("test_vit", {}, 2, "6 attentions and 6 MLPs split over 2 ranks"),
        ("test_vit", {"qk_norm": True}, 2, "6 attentions and 6 MLPs split over 2 ranks"),
        ("cait_xxs24_224", {"depth": 2}, 2, "2 attentions and 4 MLPs split over 2 ranks"),
        ("mixer_s32_224", {}, 1, "16 MLPs split over 2 ranks"),
    ],
)
def test_attention_and_mlps_are_found_and_mixing_heads_is_left_whole(
    name: str, args: dict, tier: int, text: str
) -> None:
    plan = tensor_plan(*timm_net(name, **args), 2)
    assert (plan.tier, plan.text) == (tier, text)


def test_what_only_looks_like_an_mlp_is_left_whole() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.b(self.a(x).softmax(1))

    class Scaled(nn.Module):
        """Its scale is at work behind the sum: the gradient would count twice."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.b(self.a(x).relu()) * self.scale

    for model in (Normed(), Scaled()):
        with pytest.raises(ConfigError, match="has nothing to split"):
            tensor_plan(model, (torch.randn(2, 4),), 2)
    scaled = Scaled()
    scaled.scale = None
    scaled.forward = lambda x: scaled.b(scaled.a(x).relu())
    assert tensor_plan(scaled, (torch.randn(2, 4),), 2).tier == 1


def test_heads_that_do_not_divide_are_refused_with_degrees_that_do() -> None:
    text = refused(2, "parallel=tensor", "model=vit_tiny")
    assert "the 3 heads of VisionTransformer" in text and "parallel.tp can be 1, 3" in text
    assert "ResNet has nothing to split" in refused(2, "parallel=tensor", "model=resnet18")
    dropped = ("model.args={patch_size: 8, attn_drop_rate: 0.1, proj_drop_rate: 0.1}",)
    assert "drops values inside of what is split" in refused(2, "parallel=tensor", *dropped)


# ---- what goes with what -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "overrides", "says"),
    [
        (4, ("parallel=pipeline_fsdp", "parallel.schedule=ZBVZeroBubble",
             "parallel.reshard_after_forward=true"), "set it to false"),
        (2, ("parallel=pipeline", "parallel.schedule=ZBVZeroBubble",
             "parallel.activation_checkpointing=full"), "use parallel.schedule=1F1B"),
        (2, ("parallel=tensor", "parallel.compile=true"), "does not go with parallel.tp"),
        (2, ("parallel=ddp", "parallel.param_dtype=bf16"), "use parallel=fsdp"),
        (2, ("parallel=pipeline", "task._target_=toys.Contrast"), "set parallel.pp=1"),
        (2, ("parallel=pipeline", "model.freeze=['*','!head*']"), "would train nothing"),
        (1, ("parallel=pipeline_fsdp",), "torchrun --standalone --nproc-per-node=2 train.py"),
        (6, ("parallel.dp_replicate=1", "parallel.tp=2", "parallel.pp=2"), "WORLD_SIZE=6"),
    ],
)  # fmt: skip
def test_parts_that_do_not_go_together_are_refused(
    world_size: int, overrides: tuple, says: str
) -> None:
    assert says in refused(world_size, *overrides)


def test_in_one_process_nothing_is_split_under_any_label() -> None:
    for name in ("ddp", "fsdp", "tensor", "pipeline"):
        plan, split = planned(1, f"parallel={name}")
        assert (split.stages, split.tensor, split.units, plan.n_micro) == (None, None, (), 1)


def test_a_dry_run_shows_bytes_and_stages(capsys: pytest.CaptureFixture, tmp_path) -> None:
    toys.allow()
    from ranks import train

    ended = train(1, "dry_run=16", "parallel=pipeline_fsdp_tensor", "logger=none", cwd=tmp_path)
    assert ended.codes == [0], ended.all_err
    out = " ".join(ended.all_out.split())
    assert "dp_shard 4 x tp 2 x pp 2" in out
    assert re.search(r"0 on ranks 0-7: patch_embed to .*; [\d,]+ parameters, \d+% of the work", out)
    assert re.search(r"parameters 0.1 MiB, gradients 0.1 MiB, optimizer 0.\d MiB", out)
    assert not list(tmp_path.iterdir())
