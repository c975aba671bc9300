"""Experiments, debug options, dry runs, images of all kinds, logging without an account."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from ranks import ROOT, train

SYNTHETIC = ("data=synthetic", "data.workers=0", "data.num_samples=32", "data.val_samples=8")
SMALL = ("trainer.global_batch_size=8", "logger=none")


def options(group: str) -> set[str]:
    return {p.stem for p in (ROOT / "conf" / group).glob("*.yaml")}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """train/ and val/ with two classes of JPEGs, some of them grey."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, n in (("train", 8), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(n):
                shape = (40, 48) if i % 2 else (40, 48, 3)
                pixels = rng.integers(0, 128, shape) + 127 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.jpg")
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A weights file as timm's users have it, of a model with 1,000 classes."""
    path = tmp_path_factory.mktemp("weights") / "vit_tiny.pth"
    torch.save(timm.create_model("vit_tiny_patch16_224").state_dict(), path)
    return path


def test_every_experiment_and_debug_option_is_tried_here():
    assert options("experiment") == {"digits_baseline", "finetune_imagefolder", "linear_probe"}
    assert options("debug") == {"anomaly", "overfit", "profile", "steps"}


def test_the_baseline_runs(tmp_path):
    ended = train(
        1, "experiment=digits_baseline", "trainer.max_steps=2", *SMALL, "data.workers=0",
        cwd=tmp_path,
    )  # fmt: skip
    assert ended.codes == [0], ended.all_err
    assert ended.result()["step"] == 2


@pytest.mark.parametrize("experiment", ["finetune_imagefolder", "linear_probe"])
def test_experiments_on_images_start_from_a_local_file(tmp_path, images, weights, experiment):
    ended = train(
        1,
        f"experiment={experiment}",
        f"data.root={images}",
        "model.pretrained=false",
        f"model.checkpoint_path={weights}",
        "data.image_size=32",
        "data.workers=0",
        "scheduler.warmup_epochs=null",
        "trainer.max_steps=2",
        *SMALL,
        cwd=tmp_path,
    )
    assert ended.codes == [0], ended.all_err
    assert ended.result()["step"] == 2
    if experiment == "linear_probe":
        assert ", 386 trained" in ended.all_out  # 192 x 2 weights and 2 biases


def test_overfit_reaches_a_loss_near_zero_on_one_batch(tmp_path):
    ended = train(1, "debug=overfit", "data=synthetic", *SMALL, cwd=tmp_path)
    assert ended.codes == [0], ended.all_err
    assert ended.lines("train/loss")[-1]["train/loss"] < 0.05


def test_profile_writes_a_trace(tmp_path):
    ended = train(1, "debug=profile", *SYNTHETIC, *SMALL, cwd=tmp_path)
    assert ended.codes == [0], ended.all_err
    (trace,) = (ended.folder / "profile").glob("*.json*")
    assert trace.stat().st_size > 10_000


def test_steps_run_and_validate(tmp_path):
    ended = train(1, "debug=steps", "data.workers=0", *SMALL, cwd=tmp_path)
    assert ended.codes == [0], ended.all_err
    assert ended.result()["step"] == 5
    assert ended.lines("val/loss")[-1]["val/count"] == 64


def nan_loss(rank: int) -> None:
    """The loss is the square root of something negative."""
    from meshwork.tasks import Classification

    Classification.loss = lambda self, output, batch: (output.sum(1) * 0 - 1).sqrt()


def test_anomaly_names_the_operation(tmp_path):
    ended = train(1, "debug=anomaly", *SYNTHETIC, *SMALL, cwd=tmp_path, before=nan_loss)
    assert ended.codes == [1]
    assert "SqrtBackward" in ended.all_err


def test_a_loss_that_is_not_finite_is_never_saved(tmp_path):
    ended = train(
        1, *SYNTHETIC, *SMALL, "checkpoint.every_n_steps=1", "trainer.log_every_n_steps=50",
        cwd=tmp_path, before=nan_loss,
    )  # fmt: skip
    assert ended.codes == [1]
    assert "the loss is not finite" in ended.all_err and "debug=anomaly" in ended.all_err
    assert not list((ended.folder / "checkpoints").glob("step_*"))


def settings(rank: int) -> None:
    """Print what torch was set to, at the first step."""
    from meshwork.parallel.engine import Engine

    step = Engine.step

    def shown(self: Engine, batch: object) -> object:
        print(
            "SET",
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.is_anomaly_enabled(),
        )
        return step(self, batch)

    Engine.step = shown


def test_settings_of_torch_are_those_of_the_config(tmp_path):
    given = ("trainer.deterministic=true", "trainer.matmul_precision=high")
    one = ("trainer.max_steps=1", *SYNTHETIC, *SMALL)
    assert "SET True high False" in train(1, *one, *given, cwd=tmp_path, before=settings).all_out
    assert "SET False highest False" in train(1, *one, cwd=tmp_path, before=settings).all_out


def test_a_dry_run_prints_the_plan_and_leaves_no_folder(tmp_path):
    one = train(1, "dry_run=true", cwd=tmp_path)
    many = train(1, "dry_run=64", "trainer.global_batch_size=256", cwd=tmp_path)
    assert one.codes == many.codes == [0]
    assert "64 = 1 ranks x 1 micro-batches x 64" in one.all_out
    assert "256 = 64 ranks x 1 micro-batches x 4" in many.all_out
    assert os.listdir(tmp_path) == []
    refused = train(1, "dry_run=128", cwd=tmp_path)
    assert refused.codes == [2] and "128 data ranks" in refused.all_err


def test_a_folder_of_jpegs_trains_with_one_channel_and_with_three(tmp_path, images):
    given = ("model=timm", "model.name=resnet18", "data=imagefolder", f"data.root={images}")
    given += ("data.image_size=32", "trainer.max_steps=2", "data.workers=1", *SMALL)
    for n in (1, 3):
        ended = train(1, *given, f"model.in_chans={n}", cwd=tmp_path)
        assert ended.codes == [0], ended.all_err
        assert f"2 classes, {n} x 32 x 32" in ended.all_out
        assert ended.result()["final"]["val/count"] == 6
        assert (ended.folder / "batch.png").exists() and (ended.folder / "worst.png").exists()


def test_bad_images_are_named_or_skipped_and_counted_up_to_a_limit(tmp_path, images):
    import shutil

    root = tmp_path / "data"
    shutil.copytree(images, root)
    for name in ("a.jpg", "b.jpg"):
        (root / "train" / "cat" / name).write_text("no image at all")
    given = ("data=imagefolder", f"data.root={root}", "data.image_size=32", "data.workers=1")
    given += ("trainer.max_epochs=2", "trainer.global_batch_size=6", "logger=none")
    refused = train(2, *given, cwd=tmp_path)
    assert 0 not in refused.codes
    assert str(root / "train" / "cat") in refused.all_err
    assert "data.on_bad_image=skip" in refused.all_err and "Traceback" not in refused.all_err
    ended = train(2, *given, "data.on_bad_image=skip", cwd=tmp_path)
    assert ended.codes == [0, 0], ended.all_err
    listed = "".join(p.read_text() for p in (ended.folder / "logs").glob("bad_images*"))
    assert "a.jpg" in listed and "b.jpg" in listed
    limit = ("data.on_bad_image=skip", "data.max_bad_images=0")
    ended = train(2, *given, *limit, cwd=tmp_path)
    assert 0 not in ended.codes and "data.max_bad_images" in ended.all_err


CANARY = "canary0123456789abcdef0123456789abcdef01"


def test_a_key_of_wandb_is_written_nowhere(tmp_path):
    ended = train(
        2,
        *SYNTHETIC,
        "trainer.global_batch_size=8",
        "trainer.max_steps=2",
        "logger.mode=offline",
        cwd=tmp_path,
        env={"WANDB_API_KEY": CANARY},
    )
    assert ended.codes == [0, 0], ended.all_err
    assert len(list((ended.folder / "wandb").glob("offline-run-*"))) == 1
    for path in ended.folder.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    assert CANARY not in ended.all_out + ended.all_err
    refused = train(1, f"+logger.api_key={CANARY}", cwd=tmp_path)
    assert refused.codes == [2] and "WANDB_API_KEY" in refused.all_err
    assert CANARY not in refused.all_err


def without_wandb(rank: int) -> None:
    import importlib.util

    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *a: None if name == "wandb" else find(name, *a)


def test_wandb_that_cannot_start_is_said_before_anything_heavy(tmp_path):
    home = {"HOME": str(tmp_path)}
    online = train(1, "logger.mode=online", "model.name=nope", cwd=tmp_path, env=home)
    assert online.codes == [2] and online.all_err.count("error:") == 1
    assert "WANDB_API_KEY" in online.all_err and "logger.mode=offline" in online.all_err
    missing = train(1, "model.name=nope", cwd=tmp_path, before=without_wandb)
    assert missing.codes == [2] and "logger=none" in missing.all_err


def test_tensorboard_writes_event_files(tmp_path):
    given = (*SYNTHETIC, "trainer.global_batch_size=8", "trainer.max_steps=2")
    ended = train(1, *given, "logger=tensorboard", cwd=tmp_path)
    assert ended.codes == [0], ended.all_err
    assert list((ended.folder / "tensorboard").glob("events*"))
    assert "tensorboard --logdir" in ended.all_out


def test_the_last_lines_are_commands_that_work(tmp_path):
    given = ("data=synthetic", "data.workers=0", "data.num_samples=16", "data.val_samples=8")
    ended = train(
        1, *given, "trainer.max_steps=2", *SMALL, "run.dir=a b", cwd=tmp_path
    )  # fmt: skip
    import shlex

    commands = dict(line.split(maxsplit=1) for line in ended.all_out.splitlines()[-1:])
    words = shlex.split(commands["validate"])
    again = train(1, *words[2:], cwd=tmp_path)
    assert again.codes == [0], again.all_err
    assert again.result()["final"]["val/loss"] == pytest.approx(
        json.loads((tmp_path / "a b" / "result.json").read_text())["final"]["val/loss"], rel=1e-6
    )
