"""No layout changes the numbers: fsdp, tensor, pipeline and their products against one process.

From perturbed weights: in fp64, AdamW included; in fp32 under SGD with momentum; in bf16 loosely.
All cases of a rank count share one process group.
"""

import os
from pathlib import Path

import pytest
import torch
from jobs import apart, composed, job_of, joined, perturb, relative, steps
from ranks import run_ranks

from meshwork import trainer
from meshwork.evaluate import evaluate

FP64 = "trainer.precision=fp64"
SMALL = (FP64, "data.num_samples=130", "data.val_samples=23", "data.args.split_seed=0")
VIT = (*SMALL[:1], "model.args={patch_size: 8, depth: 2}", "trainer.global_batch_size=30")
SWIN = (
    FP64,
    "model=timm",
    "model.name=swin_tiny_patch4_window7_224",
    "data.image_size=64",
    "model.args={embed_dim: 32, depths: [2, 1], num_heads: [2, 4], window_size: 4}",
    "trainer.global_batch_size=16",
)
CONVNEXT = (
    FP64,
    "model=timm",
    "model.name=test_convnext",
    "model.args={depths: [1, 1, 2, 1]}",
    "trainer.global_batch_size=30",
    "task.label_smoothing=0.1",
)
RESNET = (
    FP64,
    "model=timm",
    "model.name=test_resnet",
    "trainer.global_batch_size=32",
    "trainer.micro_batch_size=4",
)
MLP = (
    FP64,
    "data._target_=toys.noise",
    "data.image_size=8",
    "model=timm",
    "model.name=own",
    "model._target_=toys.Mlp",
    "trainer.global_batch_size=24",
)
WOVEN = (*MLP[:5], "model._target_=toys.Woven", "trainer.global_batch_size=32")
SINGLE = (*VIT[1:], "optimizer=sgd", "optimizer.lr=0.02")
CLIPPED = (*VIT, "trainer.clip_grad_norm=0.1")
PARTS = (
    FP64,
    "data._target_=toys.rows",
    "model=timm",
    "model.name=own",
    "model._target_=toys.TwoInputs",
    "task._target_=toys.ClassAndSize",
    "trainer.global_batch_size=30",
)
CONTRAST = (*VIT[:2], "trainer.global_batch_size=32", "task._target_=toys.Contrast")
BASES = {
    "vit": VIT,
    "vit clipped": CLIPPED,
    "swin": SWIN,
    "convnext": CONVNEXT,
    "resnet": RESNET,
    "mlp": MLP,
    "parts": PARTS,
    "contrast": CONTRAST,
    "woven": WOVEN,
    "vit fp32": SINGLE,
    "vit bf16": (*SINGLE, "trainer.precision=bf16"),
}
BF16_WEIGHTS = "parallel.param_dtype=bf16"
FULL = "parallel.activation_checkpointing=full"


def schedule(name: str) -> str:
    return f"parallel.schedule={name}"


# (ranks, base, overrides)
CASES = [
    (2, "vit", ("parallel=fsdp",)),
    (2, "vit", ("parallel=tensor",)),
    (2, "vit", ("parallel=pipeline",)),
    (2, "vit", ("parallel=pipeline", schedule("GPipe"))),
    (2, "vit clipped", ("parallel=pipeline", schedule("Interleaved1F1B"))),
    (2, "vit", ("parallel=pipeline", schedule("InterleavedZeroBubble"))),
    (2, "vit clipped", ("parallel=pipeline", schedule("ZBVZeroBubble"))),
    (2, "vit clipped", ("parallel=tensor", FULL)),
    (2, "vit", ("parallel=fsdp", "parallel.reshard_after_forward=false", FULL)),
    (2, "swin", ("parallel=tensor",)),
    (2, "swin", ("parallel=pipeline", schedule("ZBVZeroBubble"))),
    (2, "convnext", ("parallel=fsdp",)),
    (2, "convnext", ("parallel=pipeline", FULL)),
    (2, "resnet", ("parallel=fsdp", FULL)),
    (2, "resnet", ("parallel=pipeline",)),
    (2, "resnet", ("parallel=pipeline", schedule("ZBVZeroBubble"))),
    (2, "mlp", ("parallel=fsdp",)),
    (2, "mlp", ("parallel=tensor",)),
    (2, "mlp", ("parallel=pipeline",)),
    (2, "parts", ("parallel=fsdp",)),
    (2, "contrast", ("parallel=ddp",)),
    (2, "contrast", ("parallel=fsdp",)),
    (4, "vit clipped", ("parallel=hsdp",)),
    (4, "vit clipped", ("parallel=fsdp_tensor",)),
    (4, "vit", ("parallel=ddp", "parallel.tp=2")),
    (4, "vit", ("parallel=pipeline_ddp",)),
    (4, "vit clipped", ("parallel=pipeline_fsdp", schedule("ZBVZeroBubble"))),
    (4, "swin", ("parallel=pipeline_tensor",)),
    (4, "resnet", ("parallel=pipeline_fsdp",)),
    (4, "contrast", ("parallel=hsdp",)),
    (8, "vit clipped", ("parallel=pipeline_fsdp_tensor",)),
    *(
        (n, base, over)
        for base in ("vit fp32", "vit bf16")
        for n, over in (
            (2, ("parallel=fsdp",)),
            (2, ("parallel=tensor",)),
            (2, ("parallel=pipeline", schedule("ZBVZeroBubble"))),
            (4, ("parallel=pipeline_ddp",)),
            (8, ("parallel=pipeline_fsdp_tensor",)),
        )
    ),
    (2, "woven", ("parallel=fsdp",)),
    (2, "woven", ("parallel=pipeline",)),
    (4, "woven", ("parallel=pipeline_fsdp",)),
    (4, "vit fp32", ("parallel=pipeline_fsdp", BF16_WEIGHTS)),
]
N_STEPS = {"vit": 50, "mlp": 50, "vit fp32": 20}


def bounds(base: str, over: tuple) -> tuple[float, float, float | None]:
    """How far losses, norms and tensors may be apart; None: bf16 rounds tensors as it likes."""
    if base == "vit bf16" or BF16_WEIGHTS in over:
        return 5e-3, 5e-2, None
    return (1e-5, 1e-5, 1e-5) if base == "vit fp32" else (1e-12, 1e-9, 1e-9)


def run(rank: int, folder: str) -> None:
    """All cases of this rank count; each rank keeps what it holds."""
    n = int(os.environ["WORLD_SIZE"])
    cases = [(b, over) for ranks, b, over in CASES if ranks == n] if n > 1 else []
    with joined(dict(os.environ) if n > 1 else None) as world:
        for i, (base, over) in enumerate(cases or [(b, ()) for b in BASES]):
            job = job_of(composed(*BASES[base], *over), world, change=perturb)
            found = steps(job, N_STEPS.get(base, 8))
            found.pop("position")
            batches = trainer.evaluation_set(job, job.data.val)
            found["metrics"] = (
                {} if base == "contrast" else evaluate(job.engine, batches, world).metrics
            )
            torch.save(found, Path(folder) / f"{n}.{base if n == 1 else i}.{rank}")


def taken(n: int, folder: Path) -> None:
    run_ranks(n, run, str(folder), timeout_s=240)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("alone")
    taken(1, folder)
    return {base: torch.load(folder / f"1.{base}.0") for base in BASES}


@pytest.mark.parametrize("n", [2, 4, 8])
def test_any_layout_gives_the_numbers_of_one_process(n: int, alone: dict, tmp_path: Path) -> None:
    taken(n, tmp_path)
    for i, (base, over) in enumerate((b, o) for ranks, b, o in CASES if ranks == n):
        one, case = alone[base], (n, base, *over)
        losses, norms, tensors = bounds(base, over)
        held: dict[str, set] = {k: set() for k in ("gradients", "weights", "buffers")}
        for rank in range(n):
            many = torch.load(tmp_path / f"{n}.{i}.{rank}")
            assert relative(one["losses"], many["losses"]) < losses, case
            assert relative(one["norms"], many["norms"]) < norms, case
            assert one["metrics"].keys() == many["metrics"].keys(), case
            for name, value in one["metrics"].items():
                if tensors is not None or name == "val/count":
                    assert many["metrics"][name] == pytest.approx(value, rel=tensors), (case, name)
            for kind, names in held.items():
                mine = {k: v for k, v in many[kind].items() if k in one[kind]}
                names.update(mine)
                away = apart({k: one[kind][k] for k in mine}, mine)
                assert tensors is None or away < tensors, (case, kind)
        for kind in ("gradients", "weights"):
            assert held[kind] == one[kind].keys(), (case, kind)  # nothing is missing anywhere


def test_the_cases_count_every_sample_of_an_odd_set_and_train(alone: dict) -> None:
    assert alone["mlp"]["metrics"]["val/count"] == 21
    assert alone["vit"]["metrics"]["val/count"] == 359  # a prime
    for base in BASES:
        assert len(set(alone[base]["losses"])) == len(alone[base]["losses"]), base
    assert max(alone["vit"]["norms"]) > 1  # clipping at 0.1 was at work


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("parallel=fsdp",), ("parallel=pipeline",)])
def test_compiled_blocks_give_the_same_numbers(layout: tuple, tmp_path: Path) -> None:
    """Half a minute for a small model."""
    run_ranks(1, compiled, (), str(tmp_path), timeout_s=120)
    run_ranks(2, compiled, (*layout, "parallel.compile=true"), str(tmp_path), timeout_s=200)
    one = torch.load(tmp_path / "1.0")
    for rank in range(2):
        many = torch.load(tmp_path / f"2.{rank}")
        assert relative(one["losses"], many["losses"]) < 1e-12
        assert relative(one["norms"], many["norms"]) < 1e-9


def compiled(rank: int, over: tuple, folder: str) -> None:
    n = int(os.environ["WORLD_SIZE"])
    with joined(dict(os.environ) if n > 1 else None) as world:
        found = steps(job_of(composed(*VIT, *over), world, change=perturb), 5)
    found.pop("position")
    torch.save(found, Path(folder) / f"{n}.{rank}")
