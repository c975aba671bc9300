"""Every family of timm under fsdp, pipeline and tensor against one process: docs/survey.md.

    make survey        (or: python scripts/survey.py [MODULE ...], for example resnet)

The smallest architecture of each of timm's model modules takes three steps of SGD in float64 from
perturbed weights, in one process and on two ranks. Losses and every tensor's gradient have to agree
to 1e-9, or to 1e-5 where the model itself computes in float32 inside (and so do its sums); what is
refused says why. Results are kept in docs/survey.json as they come.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]

from ranks import run_ranks  # noqa: E402

LAYOUTS = ("fsdp", "pipeline", "tensor")
SIZES = (64, 96, 128, 160, 192, 224, 240, 256, 288, 384)
OUT = ROOT / "docs" / "survey"
LARGE = 30e6  # parameters, above which an architecture is made shallower where it can be
LIMIT_S = 300


def families() -> list[str]:
    """timm's model modules that hold architectures."""
    import timm

    return sorted({timm.models._registry._model_to_module[n] for n in timm.list_models()})


def smallest(family: str) -> tuple[str, dict, int]:
    """(architecture, arguments, image size) of the fewest parameters in a family.

    Raises ConfigError with the reason of the last one where none can be built.
    """
    import timm
    import torch

    from meshwork.config import ConfigError
    from meshwork.models import timm_model

    def count(name: str) -> float:
        try:
            with torch.device("meta"):
                return sum(p.numel() for p in timm.create_model(name).parameters())
        except Exception:
            return float("inf")

    error: Exception = ConfigError("no architecture")
    sizes = {n: count(n) for n in timm.list_models(module=family)}
    for name in sorted(sizes, key=sizes.get)[:4]:
        shrunk = [{"depth": 4}, {"depths": [1, 1, 2, 1]}] if sizes[name] > LARGE else []
        for args in (*shrunk, {}):
            for size in SIZES:
                try:
                    timm_model(name, num_classes=10, in_chans=3, img_size=size, **args)
                    return name, args, size
                except ConfigError as e:
                    error = e
                except Exception as e:  # an architecture that fails of itself at this size
                    error = ConfigError(f"{name} at {size} pixels: {type(e).__name__}: {e}")
    raise error


def run(rank: int, given: list[str], folder: str) -> str:
    """Three steps on these ranks; losses and gradients are left in a file. Returns the plan."""
    import torch
    from jobs import composed, job_of, joined, perturb, steps

    from meshwork.config import ConfigError

    n = int(os.environ["WORLD_SIZE"])
    with joined(dict(os.environ) if n > 1 else None) as world:
        try:
            job = job_of(composed(*given), world, change=perturb)
        except ConfigError as e:
            return f"refused: {e}"
        found = steps(job, 3)
    torch.save({k: found[k] for k in ("losses", "norms", "gradients")}, f"{folder}/{n}.{rank}")
    return "ran"


def compare(folder: str, n: int) -> float:
    """The largest relative difference of a loss, a norm or a tensor's gradient."""
    import torch

    one = torch.load(f"{folder}/1.0")
    away, seen = 0.0, set()
    scale = max(g.norm().item() for g in one["gradients"].values())
    for rank in range(n):
        many = torch.load(f"{folder}/{n}.{rank}")
        for kind in ("losses", "norms"):
            pairs = zip(one[kind], many[kind], strict=True)
            away = max([away, *(abs(a - b) / abs(a) for a, b in pairs)])
        for name, gradient in many["gradients"].items():
            exact = one["gradients"][name]
            # A gradient that is zero but for rounding (a key's bias) has no relative difference.
            size = max(exact.norm().item(), 1e-6 * scale)
            away = max(away, (gradient - exact).norm().item() / size)
            seen.add(name)
    assert seen == set(one["gradients"]), f"gradients of {set(one['gradients']) - seen} are missing"
    return away


def tried(family: str) -> dict[str, Any]:
    """The line of a family."""
    from meshwork.config import ConfigError

    began = time.time()
    try:
        name, args, size = smallest(family)
    except ConfigError as e:
        return {"family": family, "model": "-", **dict.fromkeys(LAYOUTS, f"not built: {e}")}
    text = "{" + ", ".join(f"{k}: {v}" for k, v in args.items()) + "}"
    given = ["model=timm", f"model.name={name}", f"model.args={text}", "data=synthetic"]
    given += [f"data.image_size={size}", "data.num_samples=16", "data.val_samples=4"]
    given += ["trainer.precision=fp64", "trainer.global_batch_size=8"]
    given += ["trainer.micro_batch_size=4", "optimizer=sgd", "optimizer.lr=0.0000001"]
    line: dict[str, Any] = {"family": family, "model": name, "args": args, "size": size}
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_ranks(1, run, given, folder, timeout_s=LIMIT_S)
        except AssertionError as e:
            return {**line, **dict.fromkeys(LAYOUTS, f"fails in one process: {last(e)}")}
        for layout in LAYOUTS:
            try:
                line[layout] = on_ranks(2, given, layout, folder)
                if "can be 1, 3" in str(line[layout]):  # three heads
                    line[layout] = on_ranks(3, given, layout, folder)
            except AssertionError as e:
                line[layout] = f"FAILS: {last(e)}"
        line["tier"], line["bound"] = run_ranks(1, facts, given, timeout_s=LIMIT_S)[0]
    line["seconds"] = round(time.time() - began)
    return line


def on_ranks(n: int, given: list[str], layout: str, folder: str) -> float | str:
    """The difference to one process, or the refusal."""
    said = run_ranks(n, run, [*given, f"parallel={layout}"], folder, timeout_s=LIMIT_S)[0]
    found = compare(folder, n) if said == "ran" else said
    for file in Path(folder).glob(f"{n}.*"):
        file.unlink()
    return found


def facts(rank: int, given: list[str]) -> tuple[int | None, float]:
    """Tier of the tensor plan (1: MLPs are split, 2: attention as well, None: nothing), and how far
    apart rounding may lead."""
    import torch
    from jobs import composed
    from torch.utils._python_dispatch import TorchDispatchMode

    from meshwork import build
    from meshwork.config import ConfigError
    from meshwork.parallel.tensor_plan import tensor_plan

    cfg = composed(*given)
    data = build.build_data(cfg)
    model, task = build.build_model(cfg, data), build.build_task(cfg, data)
    inputs = build.example_inputs(cfg, data, model, task, 2)
    kinds = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            for value in found if isinstance(found, (tuple, list)) else (found,):
                if torch.is_tensor(value) and value.requires_grad:
                    kinds.add(value.dtype)
            return found

    with Watch():
        model(*inputs)
    bound = 1e-9 if kinds <= {torch.float64} else 1e-5
    for tp in (2, 3):
        try:
            return tensor_plan(model, inputs, tp).tier, bound
        except ConfigError:
            pass
    return None, bound


def last(error: AssertionError) -> str:
    return str(error).strip().splitlines()[-1][:200]


def good(value: Any, line: dict) -> bool:
    return isinstance(value, float) and value < line.get("bound", 1e-9)


def cell(value: Any, line: dict, tier: int | None = None) -> str:
    if isinstance(value, float):
        mark = f" (tier {tier})" if tier else ""
        return f"{value:.0e}{mark}" if good(value, line) else f"WRONG {value:.0e}"
    return str(value).replace("|", "/").removeprefix("refused: ")


def table(lines: list[dict]) -> str:
    """docs/survey.md."""
    right = {k: sum(good(r[k], r) for r in lines) for k in LAYOUTS}
    wrong = [r["family"] for r in lines for k in LAYOUTS if cell(r[k], r).startswith("WRONG")]
    counts = ", ".join(f"{k} {n}" for k, n in right.items())
    tiers = {t: sum(r.get("tier") == t for r in lines) for t in (1, 2)}
    text = [
        "# timm's families on two ranks",
        "",
        f"Made by `make survey`. Of {len(lines)} families run: {counts} (tier 1 {tiers[1]}, tier 2 "
        f"{tiers[2]}). Run and wrong: {', '.join(wrong) or 'none'}. A number is the largest "
        "relative difference of a loss, norm or tensor's gradient to one process.",
        "",
        "| family | model | pixels | fsdp | pipeline | tensor |",
        "|---|---|---|---|---|---|",
    ]
    for r in lines:
        cells = [cell(r[k], r) for k in LAYOUTS[:2]] + [cell(r["tensor"], r, r.get("tier"))]
        text.append(f"| {r['family']} | {r['model']} | {r.get('size', '')} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def main() -> None:
    OUT.parent.mkdir(exist_ok=True)
    kept = OUT.with_suffix(".json")
    known = json.loads(kept.read_text()) if kept.exists() else []
    asked = sys.argv[1:]
    found = {r["family"]: r for r in known if r["family"] not in asked}
    for family in asked or families():
        if family in found:
            continue
        found[family] = line = tried(family)
        shown = " ".join(f"{k} {cell(line[k], line)[:60]}" for k in LAYOUTS)
        print(f"{family:28} {line['model']:34} {shown}", flush=True)
        lines = [found[k] for k in sorted(found)]
        kept.write_text(json.dumps(lines, indent=0) + "\n")
        OUT.with_suffix(".md").write_text(table(lines))


if __name__ == "__main__":
    main()
