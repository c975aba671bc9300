"""What README.md says to type and to write works: every recipe is done in a copy of the tree."""

import csv
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import manual
import numpy as np
import pytest
from manual import PACKAGE, ROOT
from PIL import Image
from ranks import Ended, train

NETWORK, ACCOUNT = "needs the network", "needs an account of W&B"
NOT_RUN = {
    "make train": NETWORK,
    "make test": "runs these very tests",
    "python -m pip install -e . -c constraints.txt": NETWORK,
    "conda env create -f environment.yml": NETWORK,
    "python -m pip install torch torchvision --index-url "
    "https://download.pytorch.org/whl/cu130": NETWORK,
    "python scripts/rename.py birdsong": "would rename the copy; has tests of its own",
    "autoload -Uz bashcompinit && bashcompinit && "
    'eval "$(python train.py -sc install=bash)"': "zsh",
    "python train.py experiment=finetune_imagefolder data.root=~/birds": NETWORK,
    "python train.py logger.mode=online logger.entity=my-team": ACCOUNT,
    "wandb leet outputs/latest/wandb/offline-run-*": "waits for keys to be pressed",
    "wandb sync outputs/latest/wandb/offline-run-*": ACCOUNT,
    "tensorboard --logdir outputs/latest/tensorboard": "serves until it is stopped",
}
NOT_RUN_STARTS = {
    "torchrun --nnodes=2": "needs two machines",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "needs several machines; has tests of its own",
    "srun": "needs Slurm",
}

# Typed behind a recipe that leaves the key open, so that it takes a second.
SMALL = {
    "trainer.max_steps": "2",
    "trainer.global_batch_size": "8",
    "scheduler.warmup_epochs": "null",
    "data.workers": "0",
    "data.image_size": "32",
    "data.val_samples": "8",
    "logger": "none",
}
# What a recipe types itself, and would take long.
SMALLER = {
    "trainer.max_epochs=5": "trainer.max_steps=2",
    "trainer.max_epochs=10": "trainer.max_steps=2",
    "trainer.max_epochs=120": "trainer.max_steps=3",
    "trainer.max_steps=2000": "trainer.max_steps=2",
    "trainer.stop_at_step=500": "trainer.stop_at_step=1",
    "data.val_fraction=0.1": "data.val_fraction=0.3",
}


@dataclass
class Done:
    """A command that was run. ended: of train.py; out: of another program."""

    command: str
    ended: Ended | None = None
    out: str = ""


def reason_not_to_run(command: str) -> str | None:
    starts = (why for start, why in NOT_RUN_STARTS.items() if command.startswith(start))
    return NOT_RUN.get(command) or next(starts, None)


SECTIONS = {s.title: s for s in manual.sections() if not all(map(reason_not_to_run, s.commands))}


# ---- the copy ------------------------------------------------------------------------------------


def git(folder: Path, *args: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(folder), *identity, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def photos(root: Path, per_class: dict[str, int]) -> None:
    """Two classes of JPEGs in each of these folders, told apart by their colour."""
    rng = np.random.default_rng(0)
    for folder, n in per_class.items():
        for k, name in enumerate(("heron", "wren")):
            (root / folder / name).mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(0, 128, (40, 48, 3), dtype=np.uint8)
                pixels[..., k] += 120
                Image.fromarray(pixels).save(root / folder / name / f"{i}.jpg")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the data that the recipes name."""
    import timm
    from safetensors.torch import save_file

    home = tmp_path_factory.mktemp("home")
    photos(home / "birds", {"train": 8, "val": 4, "test": 4})
    photos(home / "unsplit", {".": 16})
    photos(home / "new", {"unsorted": 3})
    for split in ("train", "val"):
        files = sorted((home / "birds" / split).rglob("*.jpg"))
        rows = [(file.relative_to(home / "birds"), file.parent.name) for file in files]
        with open(home / "birds" / f"{split}.csv", "w", newline="") as file:
            csv.writer(file).writerows(rows)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=1000)
    save_file(model.state_dict(), home / "vit_tiny.safetensors")
    return home


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree in a git repository of its own, with every file that README.md shows."""
    folder = tmp_path_factory.mktemp("trees") / "copy"
    for name in git(ROOT, "ls-files", "-co", "--exclude-standard", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for section in manual.sections():
        for path, code in section.files.items():
            assert not (folder / path).exists(), f"{path} is there already"
            (folder / path).write_text(code, encoding="utf-8")
    for args in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a fork"]):
        git(folder, *args)
    return folder


# ---- running -------------------------------------------------------------------------------------


def use_tree(folder: str, rank: int) -> None:
    """In a process of its own: the code of this folder, whatever is loaded or installed."""
    for name in [m for m in sys.modules if m.split(".")[0] in (PACKAGE, "train")]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    import train

    assert Path(train.__file__).parent == Path(folder)
    assert Path(sys.modules[PACKAGE].__file__).is_relative_to(folder)


def shortened(args: list[str]) -> list[str]:
    """The arguments, with small values behind them for what they leave open."""
    args = [SMALLER.get(a, a) for a in args]
    typed = {a.split("=")[0] for a in args}
    small = {k: v for k, v in SMALL.items() if k not in typed}
    if "data" in typed:
        small.pop("data.val_samples", None)  # the folders are small as they are
    if typed & {"logger.mode", "logger.project"}:
        small.pop("logger", None)
    return args + [f"{k}={v}" for k, v in small.items()]


def run(command: str, cwd: Path, home: Path) -> Done:
    """Run what README.md says to type; train.py starts from the forkserver."""
    env = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    script = re.fullmatch(r"(?:python|torchrun .*?(\d+)) (\S*)train\.py *(.*)", command)
    if script is None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        bash = subprocess.run(
            ["bash", "-c", command],
            cwd=cwd,
            env={**os.environ, **env, "PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert bash.returncode == 0, bash.stdout + bash.stderr
        return Done(command, out=bash.stdout)
    n, folder, args = int(script[1] or 1), (cwd / script[2]).resolve(), shlex.split(script[3])
    if not re.search(r"--help|--cfg|dry_run", script[3]):
        args = shortened(args)
    ended = train(n, *args, cwd=cwd, env=env, before=functools.partial(use_tree, str(folder)))
    assert ended.codes == [0] * n, f"{command}\n{ended.all_out}\n{ended.all_err}"
    return Done(command, ended, ended.all_out)


@pytest.mark.parametrize("title", SECTIONS)
def test_recipe(title: str, copy: Path, home: Path) -> None:
    section = SECTIONS[title]
    done = [run(c, copy, home) for c in section.commands if not reason_not_to_run(c)]
    CHECKS.get(title, lambda *_: None)(done, copy)


# ---- what a recipe promises beyond ending well ---------------------------------------------------


def finds_keys(done: list[Done], copy: Path) -> None:
    assert "optimizer.lr=1e-3" in done[0].out
    assert "\n  name: resnet18\n" in done[1].out
    assert "experiment=wide_and_short" in done[0].out, "a file that is added shows up"


def plans(done: list[Done], copy: Path) -> None:
    assert "64 = 1 ranks x 1 micro-batches x 64" in done[0].out
    assert "64 = 64 ranks x 1 micro-batches x 1" in done[1].out


def reads_folders(done: list[Done], copy: Path) -> None:
    rgb, grey, split, scanned, _ = done
    assert "train 16, val 8; 2 classes, 3 x 32 x 32" in rgb.out
    assert "2 classes, 1 x 32 x 32" in grey.out
    assert "train 22, val 10" in split.out
    assert scanned.out.startswith("32 images, 0 of them bad")


def starts_from_weights(done: list[Done], copy: Path) -> None:
    finetuned, probed, frozen = done
    assert "new: head.weight, head.bias; not used: nothing" in " ".join(finetuned.out.split())
    assert "386 trained" in probed.out, "192 weights and a bias for each of 2 classes"
    assert ", 650 trained" in frozen.out


def names_the_ranks(done: list[Done], copy: Path) -> None:
    assert "8 = 2 ranks x 1 micro-batches x 4" in done[0].out


def accumulates(done: list[Done], copy: Path) -> None:
    assert "64 = 1 ranks x 4 micro-batches x 16" in done[1].out


def leaves_early(done: list[Done], copy: Path) -> None:
    assert json.loads((copy / "outputs/sliced/status.json").read_text())["state"] == "stopped"
    assert done[2].ended.result()["step"] == 1


def goes_on(done: list[Done], copy: Path) -> None:
    first, second, third, fourth, other, longer, looked, moved = (d.ended for d in done)
    assert longer.result()["step"] == 3
    assert second.folder == first.folder == copy / "outputs" / "long"
    assert [line["attempt"] for line in second.lines("train/loss")] == [1, 2, 3]
    assert third.folder == fourth.folder and "attempt 2" in fourth.all_out
    assert other.folder != first.folder and f"loaded {first.folder}" in other.all_out
    assert longer.folder == looked.folder == first.folder
    assert json.loads((first.folder / "result_validate.json").read_text())["final"]["val/count"]
    assert "dp_shard 2" in moved.all_out and moved.folder == first.folder


def predicts(done: list[Done], copy: Path) -> None:
    _, validated, _, tested, predicted = (d.ended for d in done)
    assert validated.lines("val/count")[0]["val/count"] == 8
    assert tested.lines("test/count")[0]["test/count"] == 8
    rows = list(csv.DictReader(open(predicted.folder / "predictions.csv")))
    assert len(rows) == 6 and list(rows[0]) == ["path", "label", "heron", "wren"]


def averages(done: list[Done], copy: Path) -> None:
    assert done[0].ended.result()["objective"]["metric"] == "val_ema/top1"
    assert done[0].ended.lines("val_ema/loss") and done[0].ended.lines("val/loss")


def is_used(done: list[Done], copy: Path) -> None:
    """timm alone says of new images what mode=predict says."""
    _, looked, exported, guessed = done
    assert looked.out == "ResNet ('heron', 'wren')\n"
    assert "timm.create_model('resnet18'" in exported.out
    lines = [line.split() for line in guessed.out.splitlines()]
    assert len(lines) == 6 and {guess for _, guess in lines} <= {"heron", "wren"}


def logs(done: list[Done], copy: Path) -> None:
    wandb, offline, tensorboard, none = (d.ended.folder for d in done)
    assert list(wandb.glob("wandb/offline-run-*")) and list(offline.glob("wandb/offline-run-*"))
    assert list(tensorboard.glob("tensorboard/events*"))
    assert (none / "metrics.jsonl").exists() and not (none / "wandb").exists()


def sweeps(done: list[Done], copy: Path) -> None:
    folders = [Path(f) for f in re.findall(r"^folder +(\S+/multirun/.*)$", done[0].out, re.M)]
    assert [f.name for f in dict.fromkeys(folders)] == ["0", "1", "2", "3"]
    rates = [json.loads((f / "result.json").read_text())["overrides"] for f in folders[::2]]
    assert [r[:2] for r in rates] == [
        [f"optimizer.lr={lr}", f"seed={seed}"] for lr in ("0.001", "0.003") for seed in (0, 1)
    ]


def takes_local_yaml(done: list[Done], copy: Path) -> None:
    assert "project: birds" in (done[0].ended.folder / "config.yaml").read_text()
    assert "conf/local.yaml" not in git(copy, "status", "--porcelain", "--ignored=no")


def parts_add_up(done: list[Done], copy: Path) -> None:
    for line in done[1].ended.lines("train/loss"):
        assert line["train/loss"] == pytest.approx(line["train/entropy"] + line["train/penalty"])


def best_is_by_f1(done: list[Done], copy: Path) -> None:
    result = done[0].ended.result()
    assert result["objective"]["metric"] == "val/f1" and 0 <= result["objective"]["value"] <= 1
    assert 0 < result["final"]["val/margin"] < 1


def teaches(done: list[Done], copy: Path) -> None:
    ended = done[1].ended
    for line in ended.lines("train/loss"):
        assert line["train/loss"] == pytest.approx(line["train/labels"] + line["train/teacher"])
    assert "ResNet" in ended.all_out


def optimizes(done: list[Done], copy: Path) -> None:
    for one, name in zip(done, ("SGD", "lamb", "NAdam", "Signed"), strict=True):
        assert f"an epoch; {name}, lr" in one.out


def shows_pictures(done: list[Done], copy: Path) -> None:
    assert list(done[0].ended.folder.glob("wandb/*/files/media/images/val/said*.png"))


CHECKS = {
    "Find a key": finds_keys,
    "Look before you start": plans,
    "A folder of images": reads_folders,
    "Start from trained weights": starts_from_weights,
    "Several GPUs": names_the_ranks,
    "Memory and precision": accumulates,
    "Longer, shorter, in slices": leaves_early,
    "Resume": goes_on,
    "Validate, test, predict": predicts,
    "Averaged weights, early stopping": averages,
    "Use a trained model": is_used,
    "W&B, TensorBoard, neither": logs,
    "Sweep": sweeps,
    "What holds on this machine": takes_local_yaml,
    "A loss": parts_add_up,
    "A metric": best_is_by_f1,
    "A teacher, or another frozen helper": teaches,
    "An optimizer": optimizes,
    "A picture at each validation": shows_pictures,
}
