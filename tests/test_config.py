"""`load` types a composed config, or lists every problem in it at once."""

import copy
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from meshwork import config
from meshwork.keys import schema_keys
from meshwork.schema import CHOICES, OPEN, PATHS, RANGES

pytestmark = pytest.mark.quick

CONF = Path(__file__).parents[1] / "conf"


@pytest.fixture(scope="module")
def default() -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train")


def changed(default: DictConfig, **values) -> DictConfig:
    """A copy of the default config; `trainer__max_epochs=3` sets trainer.max_epochs."""
    cfg = copy.deepcopy(default)
    for key, value in values.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False, force_add=True)
    return cfg


def problems(cfg: DictConfig, *before: str) -> list[str]:
    with pytest.raises(config.ConfigError) as e:
        config.load(cfg, before)
    return e.value.problems


def test_the_default_config_is_typed(default):
    cfg = config.load(default)
    assert isinstance(cfg, config.Config) and isinstance(cfg.data.augment, config.Augment)
    assert (cfg.seed, cfg.dry_run, cfg.optimizer.lr) == (0, False, 1e-3)
    assert cfg.model.args == {"patch_size": 8}


def test_the_saved_yaml_is_the_config_again(default):
    cfg = config.load(
        changed(default, run__notes="${mode} 模型", task__criterion={"_target_": "x"})
    )
    assert cfg.run.notes == "train 模型"
    assert config.load(OmegaConf.create(config.resolved_yaml(cfg))) == cfg


def test_paths_are_made_absolute_from_here(default, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BIRDS", "/birds")
    cfg = config.load(changed(default, run__dir="a/../b", data__root="$BIRDS/x"))
    assert (cfg.run.dir, cfg.data.root) == (str(tmp_path / "b"), "/birds/x")
    assert (cfg.run.root, cfg.checkpoint.resume) == (str(tmp_path / "outputs"), "auto")


def test_every_problem_is_listed_at_once_after_those_found_before(default):
    cfg = changed(
        default, optimizer__lr="abc", seed=-1, data__root="???", model__nme="x", mode="trian"
    )
    assert set(problems(cfg, "before", "before")) == {
        "before",
        "optimizer.lr=abc: expected a number",
        f"seed=-1: expected 0 to {2**63 - 1}",
        "data.root has no value: type data.root=...",
        "no key model.nme: did you mean model.name?",
        "mode=trian: expected train, validate, test, predict (did you mean train?)",
    }


def test_problems_found_before_are_enough_to_refuse(default):
    assert problems(default, "one", "two") == ["one", "two"]


def test_mandatory_values_are_listed_together_also_inside_args(default):
    cfg = changed(default, data__root="???", model__name="???", model__args={"a": {"b": "???"}})
    assert problems(cfg) == [
        "model.name has no value: type model.name=...",
        "model.args.a.b has no value: type model.args.a.b=...",
        "data.root has no value: type data.root=...",
    ]


def test_a_key_that_a_config_lacks_has_no_value(default):
    cfg = OmegaConf.create({k: v for k, v in default.items() if k not in ("seed", "trainer")})
    assert problems(cfg) == [
        "seed has no value: type seed=...",
        "trainer has no value: type trainer=...",
    ]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("trainer__max_epochs", 1.5, "a whole number or null"),
        ("trainer__max_epochs", True, "a whole number or null"),
        ("trainer__global_batch_size", None, "a whole number"),
        ("optimizer__lr", True, "a number"),
        ("model__pretrained", "maybe", "true or false"),
        ("model__name", ["a"], "text"),
        ("run__tags", "a", "a list [...] of text"),
        ("data__augment__scale", ["a", 1], "a list [...] of a number or null"),
        ("model__args", None, "keys with values {key: value}"),
        ("dry_run", 1.5, "true or false or a whole number"),
    ],
)
def test_a_wrong_type_is_named(default, key, value, expected):
    (found,) = problems(changed(default, **{key: value}))
    shown = "null" if value is None else value
    assert found == f"{key.replace('__', '.')}={shown}: expected {expected}"


@pytest.mark.parametrize("value", [True, False, 1, 64])
def test_dry_run_takes_a_flag_or_a_number_of_ranks(default, value):
    got = config.load(changed(default, dry_run=value)).dry_run
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("key", [k for k, (low, _) in RANGES.items()])
def test_what_is_out_of_range_or_not_finite_is_refused(default, key):
    low, high = RANGES[key]
    listed = key.startswith("data.augment.") and key.split(".")[-1] in ("scale", "ratio")
    listed = listed or key == "scheduler.milestones"
    whole = "int" in str(schema_keys()[key])
    bad = [low - 1] + ([] if whole else [float("nan"), float("inf")])
    bad += [] if high is None else [high + 1]
    for number in bad:
        value = [number, number] if listed else number
        (found,) = problems(changed(default, **{key.replace(".", "__"): value}))
        limits = f"at least {low}, and finite" if high is None else f"{low} to {high}"
        assert found.startswith(f"{key}=") and found.endswith(f": expected {limits}")


def test_every_choice_is_accepted_and_nothing_else(default):
    for key, choices in CHOICES.items():
        for choice in choices:
            config.load(changed(default, **{key.replace(".", "__"): choice}))
        (found,) = problems(changed(default, **{key.replace(".", "__"): "zzz"}))
        assert found == f"{key}=zzz: expected {', '.join(choices)}"


def test_intervals_may_be_null(default):
    keys = ("trainer.val_every_n_epochs", "checkpoint.every_n_epochs", "objective.mode")
    cfg = config.load(changed(default, **{k.replace(".", "__"): None for k in keys}))
    assert cfg.trainer.val_every_n_epochs is cfg.checkpoint.every_n_epochs is None


def test_keys_that_do_not_go_together_are_named(default):
    assert problems(
        changed(
            default, trainer__max_epochs=None, scheduler__warmup_epochs=1, scheduler__warmup_steps=0
        )
    ) == [
        "trainer.max_epochs and trainer.max_steps are both null: give one of them",
        "scheduler.warmup_steps and scheduler.warmup_epochs are both given: set one of them to "
        "null",
    ]
    assert problems(changed(default, data__augment__ratio=[2, 1], dry_run=0)) == [
        "data.augment.ratio=[2.0, 1.0]: expected [smallest, largest]",
        "dry_run=0: expected true, false or a number of ranks",
    ]


def test_an_interpolation_that_leads_nowhere_hides_no_other_problem(default):
    found = problems(changed(default, seed="${nope.a}", run__notes="${nope.b}", mode="x"))
    assert len(found) == 3
    assert "run.notes=${nope.b} cannot be resolved: Interpolation key 'nope.b' not found" in found


def test_secrets_are_refused_at_any_depth_and_never_shown(default):
    args = {"settings": [{"api_key": "canary"}], "use_cls_token": True, "num_tokens": 3}
    found = problems(changed(default, logger__args=args, logger__entity={"password": "canary"}))
    assert [f.split(" is a secret")[0] for f in found] == [
        "logger.entity.password",
        "logger.args.settings[0].api_key",
    ]


def test_the_lists_of_the_schema_name_keys_that_exist():
    known = schema_keys()
    assert set(PATHS) | set(OPEN) | set(CHOICES) | set(RANGES) <= set(known)
    numbers = {k for k, kind in known.items() if "float" in str(kind)}
    assert numbers <= set(RANGES), "every float has a range, so that nan is refused"
