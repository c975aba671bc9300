"""Jobs built as train.py builds them, and taken step by step."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import toys
from hydra import compose, initialize_config_dir

from meshwork import build, cli, config, distributed, optim, resume
from meshwork.checkpoint import Position, Saver
from meshwork.distributed import World
from meshwork.ema import Ema
from meshwork.job import Job
from meshwork.mesh import Layout
from meshwork.parallel.check import check
from meshwork.parallel.fsdp import whole
from meshwork.parallel.parallelize import parallelize
from meshwork.ranks import Ranks, ranks_from
from meshwork.rundir import RunDir
from meshwork.stopping import Stop
from meshwork.trainer import advance, train_batches

CONF = Path(__file__).parents[1] / "conf"


def composed(*overrides: str) -> config.Config:
    """The config of `train.py OVERRIDES`, by default quiet and without workers."""
    toys.allow()
    typed = cli.read(["logger=none", "data.workers=0", *overrides], CONF)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return config.load(compose("train", typed.good), typed.problems)


@contextmanager
def joined(env: dict[str, str] | None = None) -> Iterator[World]:
    """The ranks of this environment, or one process."""
    ranks = Ranks() if env is None else ranks_from(env)
    with distributed.start(ranks, torch.device("cpu"), 60) as world:
        yield world


class Silent:
    """A report that says nothing; train_lines and notes are what it was told."""

    loggers = None
    objective = ("val/loss", "min")

    def __init__(self) -> None:
        self.train_lines: list[dict] = []
        self.notes: list[str] = []

    def train_line(self, metrics: dict, position: Position) -> None:
        self.train_lines.append({"step": position.step, **metrics})

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def job_of(cfg: config.Config, world: World, folder: Path = Path("."), change: Any = None) -> Job:
    """The parts of a run; change: called with the bare model before it goes to the ranks."""
    layout = Layout.resolve(cfg.parallel, world.ranks.world_size)
    data = build.build_data(cfg)
    task = build.build_task(cfg, data)
    model = build.build_model(cfg, data)
    if change is not None:
        change(model)
    inputs = partial(build.example_inputs, cfg, data, model, task)
    plan, split = check(cfg, model, task, layout, world.device, inputs)
    horizon, options = optim.check(cfg, model, data, plan)
    found = resume.choose(cfg, RunDir(folder, "test", 1), world)
    if found is not None and cfg.mode == "train":
        found = resume.settle(cfg, found, plan, data, layout)
        horizon = resume.horizon_of(cfg, found, plan, len(data.train), horizon)
    engine = parallelize(model, task, cfg, layout, plan, split, world)
    optimizer = optim.build_optimizer(cfg.optimizer, engine.named_parameters(), options)
    schedule = optim.Schedule(cfg.scheduler, optimizer, horizon)
    ema = Ema(engine, cfg.trainer.ema_decay) if cfg.trainer.ema_decay is not None else None
    run = RunDir(folder, "test", 1)
    saver, stop = Saver(cfg.checkpoint, run.checkpoints, world), Stop(world, folder)
    parts = engine, plan, horizon, data, optimizer, schedule, Silent(), saver, stop, ema, found
    return Job(cfg, world, run, *parts)


@torch.no_grad()
def perturb(model: torch.nn.Module) -> None:
    """Every parameter away from its initial value, scales near one: no block does nothing."""
    g = torch.Generator().manual_seed(7)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)
        is_scale = p.ndim == 1 and not name.endswith("bias")
        p.copy_(1 + 0.1 * noise if is_scale else p + 0.05 * noise)


def steps(job: Job, n: int, sync: bool = True) -> dict[str, Any]:
    """n steps of the loop: losses and norms of each, gradients of the last, weights and buffers."""
    position, losses, norms, parts = Position(), [], [], []
    batches = train_batches(job, position)
    job.engine.train()
    for _ in range(n):
        batch = next(batches).to(job.world.device, job.engine.dtype)
        job.schedule.set(position.step)
        shares = job.engine.step(batch)
        total = job.world.sum(torch.stack(list(shares.values())).double())
        losses.append(total[0].item())
        parts.append(dict(zip(shares, total.tolist(), strict=True)))
        fused = job.engine.fused
        gradients = {
            n: whole(p.grad, fused.get(n, 1)).clone()
            for n, p in job.engine.named_parameters()
            if p.grad is not None
        }
        norms.append(float(job.engine.clip_grad_norm(job.cfg.trainer.clip_grad_norm)))
        job.engine.update(job.optimizer)
        advance(position, batch.total, job)
    if sync:
        job.engine.sync_buffers()
    held = job.engine.parts
    weights = ((n, whole(p, fused.get(n, 1))) for n, p in job.engine.named_parameters())
    return {
        "losses": losses,
        "norms": norms,
        "parts": parts,
        "gradients": gradients,
        "weights": {n: w.clone() for n, w in weights},
        "buffers": {n: b.clone() for part in held for n, b in part.named_buffers()},
        "position": position,
    }


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest ||a - b|| / ||a|| over the tensors of two dicts."""
    assert a.keys() == b.keys()
    pairs = ((a[n].double(), b[n].double()) for n in a)
    away = (((x - y).norm() / x.norm().clamp_min(1e-30)).item() for x, y in pairs)
    return max(away, default=0.0)


def relative(a: list[float], b: list[float]) -> float:
    """The largest |a - b| / |a|."""
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))
