"""The one entry: compose the config, check it, start the ranks, train.

python train.py [GROUP=OPTION] [KEY=VALUE] ...
torchrun --standalone --nproc-per-node=2 train.py ...
"""

import os
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "src"))  # this tree's code, also where another one is installed

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from meshwork import cli, config, start  # noqa: E402
from meshwork.ranks import Ranks, ranks_from  # noqa: E402

CONF = HERE / "conf"


def main(argv: list[str]) -> int:
    """Exit code: 0 finished, 1 failure, 2 wrong input, 75 stopped on request (torchrun: 0)."""
    if cli.wants_help(argv):
        print(cli.help_text(CONF))
        return 0
    codes = []
    with start.sentences(None) as outcome:
        outcome.ranks = ranks = ranks_from(os.environ)
        typed = cli.read(argv, CONF)
        start.check_typed(typed, ranks, CONF)
        sys.argv[1:] = typed.argv + start.sweep_folder(typed)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's errors come to us and leave as sentences

        @hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
        def job(cfg: DictConfig) -> float | None:
            with start.sentences(ranks) as one:
                one.objective = run(config.load(cfg), ranks)
            codes.append(one.code)  # a job of a sweep that fails takes nothing with it
            return one.objective

        job()
    return max([outcome.code, *codes])


def run(cfg: config.Config, ranks: Ranks) -> float | None:
    """One run, from its config to its result; returns the objective."""
    from meshwork import build, distributed, modes, optim, resume, rundir
    from meshwork.checkpoint import Saver
    from meshwork.console import start_table
    from meshwork.ema import Ema
    from meshwork.job import Job
    from meshwork.mesh import Layout
    from meshwork.overview import ranks_row, rows_of_plan
    from meshwork.parallel.check import check
    from meshwork.parallel.parallelize import parallelize
    from meshwork.report import Report
    from meshwork.stopping import Stop

    hydra_config = HydraConfig.get()
    overrides = list(hydra_config.overrides.task)
    sweep = rundir.sweep_of(hydra_config)
    rundir.check_writable(cfg, sweep)
    build.check_logger(cfg)
    resume.check(cfg.checkpoint.resume)

    device = distributed.pick_device(cfg.runtime.device, ranks)
    world_size = ranks.world_size if isinstance(cfg.dry_run, bool) else cfg.dry_run
    layout = Layout.resolve(cfg.parallel, world_size)
    data = build.build_data(cfg)
    task = build.build_task(cfg, data)
    model = build.build_model(cfg, data)
    inputs = partial(build.example_inputs, cfg, data, model, task)
    plan, split = check(cfg, model, task, layout, device, inputs)
    horizon, options = optim.check(cfg, model, data, plan)
    rows = rows_of_plan(cfg, layout, plan, split, model, data, horizon)
    if cfg.dry_run is not False:
        print(start_table([("dry run", f"{world_size} ranks, nothing started"), *rows]))
        return None

    limits = cfg.runtime.timeout_s, cfg.runtime.step_timeout_s
    with distributed.start(ranks, device, *limits) as world:
        world.require_same("the command line", overrides)
        world.require_same("data.root", build.data_facts(data))
        world.run = folder = rundir.enter(cfg, world, overrides, sweep)
        rundir.log_to_file(folder, world)
        if world.is_main:
            rundir.describe(folder, cfg, world, hydra_config, overrides)
        loggers = build.build_loggers(cfg, folder, sweep) if world.is_main else []
        report = Report(cfg, folder, world, loggers, data, model, task)
        world.at_exit.append(report.finish)
        found = resume.choose(cfg, folder, world)
        if found is not None and cfg.mode == "train":
            found = resume.settle(cfg, found, plan, data, layout)
            if plan.coupled:  # BatchNorm goes on over as many samples
                plan, split = check(cfg, model, task, layout, device, inputs)
            horizon = resume.horizon_of(cfg, found, plan, len(data.train), horizon)
        engine = parallelize(model, task, cfg, layout, plan, split, world)
        optimizer = optim.build_optimizer(cfg.optimizer, engine.named_parameters(), options)
        schedule = optim.Schedule(cfg.scheduler, optimizer, horizon)
        del model, split, inputs  # a rank of a pipeline keeps its own stages alone
        report.table(
            [*rundir.rows(folder), ("ranks", ranks_row(world)), *rows, report.logging_row()]
        )
        ema = Ema(engine, cfg.trainer.ema_decay) if cfg.trainer.ema_decay is not None else None
        saver, stop = Saver(cfg.checkpoint, folder.checkpoints, world), Stop(world, folder.path)
        parts = engine, plan, horizon, data, optimizer, schedule, report, saver, stop, ema, found
        with stop:
            outcome = modes.MODES[cfg.mode](Job(cfg, world, folder, *parts))
            objective = report.result(outcome, overrides, stop.reason)
            goes_on = outcome.stopped and stop.node_stays()
    # torchrun takes another code than 0 for a failure, and starts the ranks again.
    if outcome.stopped and (goes_on or ranks.source != "torchrun"):
        raise start.Reported(start.STOPPED)
    return objective


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
