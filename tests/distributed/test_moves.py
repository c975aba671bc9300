"""A checkpoint knows no layout: saved under any, the run goes on under any other with the numbers
of the run in one process that was never stopped."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import apart, composed, job_of, joined, perturb, relative
from ranks import run_ranks

from meshwork import trainer
from meshwork.checkpoint import read_model
from meshwork.checkpoint_files import newest

RUN = ("model.args={patch_size: 8, depth: 4}", "data.num_samples=160", "trainer.precision=fp64")
RUN += ("trainer.global_batch_size=32", "trainer.max_steps=40", "trainer.log_every_n_steps=1")
RUN += ("trainer.micro_batch_size=4", "scheduler.warmup_steps=3", "checkpoint.every_n_epochs=null")
RUN += ("trainer.ema_decay=0.9",)
# Ranks and layout. 160 samples in batches of 32: step 7 is in the middle of the second epoch.
LAYOUTS = {
    "one": (1, ()),
    "ddp": (2, ()),
    "fsdp": (2, ("parallel=fsdp",)),
    "tensor": (2, ("parallel=tensor",)),
    "interleaved": (2, ("parallel=pipeline", "parallel.schedule=Interleaved1F1B")),
    "fsdp of three": (3, ("parallel=fsdp",)),
    "hsdp": (4, ("parallel=hsdp",)),
    "fsdp_tensor": (4, ("parallel=fsdp_tensor",)),
    "pipeline_fsdp": (4, ("parallel=pipeline_fsdp", "parallel.schedule=ZBVZeroBubble")),
}
SAVED_AT, NEAR, FAR = 7, 10, 27


def go(rank: int, root: str, starts: list[tuple[str, str | None, int]]) -> list:
    """Runs of this number of ranks, (layout, layout of the checkpoint, last step) each.

    Returns [(losses, norms) from the start on]."""
    n, found = int(os.environ["WORLD_SIZE"]), []
    with joined(dict(os.environ) if n > 1 else None) as world:
        for name, source, stop in starts:
            resume = f"checkpoint.resume={root}/{source}/to {SAVED_AT}" if source else ""
            given = [*RUN, *LAYOUTS[name][1], f"trainer.stop_at_step={stop}", resume]
            folder = Path(root, name if source is None else f"{source} {name}", f"to {stop}")
            job = job_of(composed(*filter(None, given)), world, folder, change=perturb)
            job.data = replace(job.data, val=None)
            trainer.fit(job)
            lines = job.report.train_lines
            found.append(([x["train/loss"] for x in lines], [x["train/grad_norm"] for x in lines]))
    return found


def on_each(root: Path, starts: list[tuple[str, str | None, int]]) -> dict:
    """{(layout, source, stop): (losses, norms)}, by one group of processes a number of ranks."""
    found = {}
    for n in sorted({LAYOUTS[s[0]][0] for s in starts}):
        mine = [s for s in starts if LAYOUTS[s[0]][0] == n]
        results = run_ranks(n, go, str(root), mine, timeout_s=240)
        found |= dict(zip(mine, results[0], strict=True))
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moves")


@pytest.fixture(scope="module")
def unbroken(root: Path) -> tuple[list[float], list[float]]:
    """Losses and norms of one process; its folder holds the weights of the steps compared."""
    starts = [("one", None, stop) for stop in (SAVED_AT, NEAR, FAR)]
    return on_each(root, starts)[starts[-1]]


@pytest.fixture(scope="module")
def saved(root: Path, unbroken: tuple) -> None:
    """A checkpoint of every layout."""
    on_each(root, [(name, None, SAVED_AT) for name in LAYOUTS if name != "one"])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    path = newest(folder)
    both = read_model(path), read_model(path, "ema")
    return {f"{kind}.{k}": v for kind, m in zip("me", both, strict=True) for k, v in m.items()}


def check(root: Path, start: tuple, numbers: tuple, unbroken: tuple) -> None:
    name, source, stop = start
    for mine, wanted in zip(numbers, unbroken, strict=True):
        assert relative(wanted[SAVED_AT:stop], mine) < 1e-12, start
    exact, moved = (
        weights_of(root / "one" / f"to {stop}"),
        weights_of(root / f"{source} {name}" / f"to {stop}"),
    )
    assert apart(exact, moved) < 1e-9, start


PAIRS = [(a, b, NEAR) for a in LAYOUTS for b in LAYOUTS if a != b]


@pytest.mark.parametrize(
    "starts",
    [pytest.param(PAIRS[::5], id="some"), pytest.param(PAIRS, id="all", marks=pytest.mark.slow)],
)
def test_every_layout_goes_on_from_every_other(
    starts: list, root: Path, unbroken: tuple, saved: None
) -> None:
    """One in five pairs, that between them save and load every layout; all of them when asked."""
    assert {a for a, _, _ in starts} == {b for _, b, _ in starts} == set(LAYOUTS)
    found = on_each(root, starts)
    for start, numbers in found.items():
        check(root, start, numbers, unbroken)


def test_twenty_steps_after_a_move_are_those_of_the_unbroken_run(
    root: Path, unbroken: tuple, saved: None
) -> None:
    names = ["one", "fsdp of three", "pipeline_fsdp", "tensor"]
    starts = [(a, b, FAR) for a, b in zip(names, [names[-1], *names], strict=False)]
    for start, numbers in on_each(root, starts).items():
        check(root, start, numbers, unbroken)


def test_the_check_itself_finds_moments_that_are_lost(root: Path, unbroken: tuple) -> None:
    """The same, but from the weights alone: SGD's state is none of AdamW's."""
    path = newest(root / "one" / f"to {SAVED_AT}")
    with joined() as world:
        given = (*RUN, f"checkpoint.resume={path}", f"trainer.stop_at_step={NEAR}")
        job = job_of(composed(*given), world, root / "lost")
        job.data = replace(job.data, val=None)
        job.found.state["optimizer"] = "SGD"
        trainer.fit(job)
    lines = [x["train/loss"] for x in job.report.train_lines]
    assert relative(unbroken[0][SAVED_AT:NEAR], lines) > 1e-9
