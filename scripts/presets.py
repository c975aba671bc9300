"""Every preset of conf/parallel trained on digits beside one process: docs/presets.md.

    make presets        (or: python scripts/presets.py [PRESET ...] [--seeds 0,1] [KEY=VALUE ...])

Runs are started one at a time, on the CPU or on as many GPUs as a preset has ranks. Each is kept in
docs/presets.json as it ends; what is kept is not run again, unless its preset is named. Keys and
values replace those of a shorter training than the default; the table shows that training.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "presets"
RANKS = {  # the fewest that suit each
    "one process": 1,
    "ddp": 2,
    "fsdp": 2,
    "hsdp": 4,
    "tensor": 2,
    "pipeline": 2,
    "fsdp_tensor": 4,
    "pipeline_ddp": 4,
    "pipeline_fsdp": 4,
    "pipeline_tensor": 4,
    "pipeline_fsdp_tensor": 8,
}
TRAINING = {"trainer.max_epochs": "20"}
QUICK = {  # what changes no number of the last validation
    "trainer.val_every_n_epochs": "null",
    "checkpoint.every_n_epochs": "null",
    "data.workers": "0",
    "logger": "none",
}
LIMIT_S = 3600


def trained(preset: str, seed: int, training: dict[str, str]) -> dict[str, Any]:
    """One run of train.py: its top-1 at the last validation, or the line that it failed with."""
    n, began = RANKS[preset], time.time()
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    command = [sys.executable, *(torchrun if n > 1 else [])]
    given = {**QUICK, **training, "seed": seed, **({"parallel": preset} if n > 1 else {})}
    run: dict[str, Any] = {"preset": preset, "seed": seed, "training": shown(training)}
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"{k}={v}" for k, v in {**given, "run.dir": f"{folder}/run"}.items()]
        error = waited([*command, "train.py", *overrides], Path(folder) / "err")
        result = Path(folder) / "run" / "result.json"
        if error is None and result.exists():
            run["top1"] = json.loads(result.read_text())["final"]["val/top1"]
        else:
            run["failed"] = error or "no result.json"
    return {**run, "seconds": round(time.time() - began)}


def waited(command: list[str], err: Path) -> str | None:
    """Run a command to its end; the line of stderr that says why it failed, None where it did not.

    err: the file that takes stderr.
    """
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    with open(err, "w") as file:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": file}
        process = subprocess.Popen(command, cwd=ROOT, env=env, **quiet)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.wait()
            return f"not done after {LIMIT_S} s"
    lines = [line.strip() for line in err.read_text().splitlines() if line.strip()]
    told = [line for line in lines if "rror: " in line and "ChildFailedError" not in line]
    last = (told or lines or [f"exit code {code}"])[-1]
    return None if code == 0 else (last.partition("error: ")[2] or last)[:200]


def shown(training: dict[str, str]) -> str:
    return " ".join(f"{k}={v}" for k, v in training.items())


def table(runs: list[dict], training: str) -> str:
    """docs/presets.md, of the runs of one training."""
    found = {(r["preset"], r["seed"]): r for r in runs}
    seeds = sorted({seed for _, seed in found})
    one = mean([found.get(("one process", s), {}) for s in seeds])
    text = [
        "# The presets on digits",
        "",
        f"Made by `make presets`: the default config, shortened or changed by `{training}`. Top-1 "
        "at the last validation in percent; the difference of the means to one process is in "
        "points.",
        "",
        f"| preset | ranks | {' | '.join(f'seed {s}' for s in seeds)} | mean | difference "
        "| within one point |",
        f"|---|---|{'---|' * len(seeds)}---|---|---|",
    ]
    for preset, n in RANKS.items():
        row = [found.get((preset, s), {}) for s in seeds]
        if not any(row):
            continue
        own = mean(row)
        away = None if own is None or one is None else own - one
        cells = [cell(r) for r in row] + ["" if own is None else f"{100 * own:.2f}"]
        if preset == "one process" or away is None:
            cells += ["", ""]
        else:
            cells += [f"{100 * away:+.2f}", "yes" if abs(away) <= 0.01 else "NO"]
        text.append(f"| {preset} | {n} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def mean(row: list[dict]) -> float | None:
    """Mean top-1 of the seeds, None where one is missing or has failed."""
    return statistics.mean(r["top1"] for r in row) if all("top1" in r for r in row) else None


def cell(run: dict) -> str:
    if "failed" in run:
        return f"FAILED: {run['failed']}".replace("|", "/")
    return f"{100 * run['top1']:.2f}" if run else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="presets, and overrides of train.py")
    parser.add_argument("--seeds", default="0,1,2", help="with commas between them")
    given = parser.parse_intermixed_args()
    asked = [w for w in given.what if "=" not in w]
    if wrong := set(asked) - set(RANKS):
        parser.error(f"no preset {', '.join(sorted(wrong))}: choose among {', '.join(RANKS)}")
    training = TRAINING | dict(w.split("=", 1) for w in given.what if "=" in w)
    OUT.parent.mkdir(exist_ok=True)
    kept = OUT.with_suffix(".json")
    runs = json.loads(kept.read_text()) if kept.exists() else []
    for seed in map(int, given.seeds.split(",")):
        for preset in asked or RANKS:
            key = (preset, seed, shown(training))
            same = [r for r in runs if (r["preset"], r["seed"], r["training"]) == key]
            if any("top1" in r for r in same) and not asked:
                continue
            run = trained(preset, seed, training)
            print(f"{preset:<21} seed {seed}  {cell(run)}  ({run['seconds']} s)", flush=True)
            runs = [r for r in runs if r not in same] + [run]
            kept.write_text(json.dumps(runs, indent=0) + "\n")
            mine = [r for r in runs if r["training"] == shown(training)]
            OUT.with_suffix(".md").write_text(table(mine, shown(training)))


if __name__ == "__main__":
    main()
