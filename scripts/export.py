"""Write a trained model as one file: python scripts/export.py RUN_OR_CHECKPOINT [--out FILE]

FILE.safetensors holds the weights under the bare model's names (the average where one was kept);
FILE.json the architecture, its arguments, the classes and the transform in timm's words.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from meshwork import build, config, start
from meshwork.config import ConfigError
from meshwork.trained import Trained, read


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 written, 2 wrong input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run folder, or one of its checkpoints/step_<n>")
    parser.add_argument("--out", help="a name ending in .safetensors (RUN/model.safetensors)")
    parser.add_argument("--best", action="store_true", help="the best checkpoint, not the last")
    args = parser.parse_args(argv)
    with start.sentences(None) as outcome:
        if args.out and not args.out.endswith(".safetensors"):
            raise ConfigError(f"--out {args.out}: expected a name ending in .safetensors")
        trained = read(args.run, "best" if args.best else "last")
        out = Path(config.absolute(args.out or str(trained.path.parents[1] / "model.safetensors")))
        facts = described(trained)
        try:
            write(trained, facts, out)
        except OSError as e:
            raise ConfigError(f"{out} cannot be written ({e}): choose another --out") from e
        weights = "average of the weights (EMA)" if trained.averaged else "weights"
        print(f"# {weights} of {trained.path}\n{lines(facts, out)}")
    return outcome.code


def described(trained: Trained) -> dict:
    """What stands in the JSON file.

    args are those of `timm.create_model`, transform those of `timm.data.create_transform`. For a
    model of another kind architecture is its `_target_` and args what the config has for it.
    """
    from meshwork.data.transforms import channels

    m, n = trained.settings, trained.in_chans
    size = [n, trained.image_size, trained.image_size]
    norm = {k: list(channels(trained.images[k], n)) for k in ("mean", "std")}
    architecture, args = timm_call(trained) or (m._target_, m.args)
    return {
        "architecture": architecture,
        "args": args,
        "classes": list(trained.classes),
        "transform": {"input_size": size, **trained.images, **norm},
    }


def timm_call(trained: Trained) -> tuple[str, dict] | None:
    """(name, arguments) for `timm.create_model`, if plain values are all that it takes."""
    from meshwork.models.timm_model import timm_arguments, timm_model

    m = trained.settings
    made_by = build.resolve(m._target_, "model._target_")
    if made_by is not timm_model or "_target_" in json.dumps(m.args):
        return None
    n_classes = len(trained.classes) or m.num_classes
    size = m.img_size or trained.image_size
    return m.name, timm_arguments(m.name, n_classes, trained.in_chans, size, m.args)


def write(trained: Trained, facts: dict, out: Path) -> None:
    """Write both files; tied weights stand under each of their names."""
    from safetensors.torch import save_file

    out.parent.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().clone() for k, v in trained.model.state_dict().items()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, out)
    out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")


def lines(facts: dict, out: Path) -> str:
    """The lines of Python that use the files."""
    if "." in facts["architecture"].split("/")[-1] and facts["architecture"].count(".") > 1:
        return (
            "from safetensors.torch import load_file\n"
            f"model.load_state_dict(load_file({str(out)!r}))  # {facts['architecture']}"
        )
    args = "".join(f", {k}={v!r}" for k, v in facts["args"].items())
    name, transform = facts["architecture"], facts["transform"]
    given = ", ".join(f"{k}={v!r}" for k, v in transform.items())
    return (
        "import timm\n"
        f"model = timm.create_model({name!r}, checkpoint_path={str(out)!r}{args}).eval()\n"
        f"transform = timm.data.create_transform({given})\n"
        f"classes = {facts['classes']!r}"
    )


if __name__ == "__main__":
    sys.exit(main())
