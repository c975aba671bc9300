"""Every file of conf/ is described and composes, alone and with every option of another group."""

import itertools
import re
import shutil
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from meshwork import config
from meshwork.helptext import described_keys, description
from meshwork.keys import schema_keys

CONF = Path(__file__).parents[1] / "conf"

# Values for what an option leaves to the person who types it.
GIVEN = {
    "model.name": "resnet18",
    "data.root": "/data",
    "optimizer.name": "lamb",
    "scheduler.milestones": "[1]",
}


def loaded(overrides: list[str], conf: Path = CONF) -> config.Config:
    """The config, with a value for everything that the options leave open."""
    with initialize_config_dir(str(conf), version_base="1.3"):
        try:
            return config.load(compose("train", overrides))
        except config.ConfigError as e:
            missing = [p.split(" ")[0] for p in e.problems if " has no value" in p]
            given = [f"{key}={GIVEN[key]}" for key in missing]
            return config.load(compose("train", overrides + given))


def groups() -> dict[str, list[str]]:
    """Groups with at least one option."""
    return {g: options for g, options in config.option_files(CONF).items() if options}


def all_pairs(choices: dict[str, list[str]]) -> list[dict[str, str]]:
    """Few combinations that hold every pair of options of different groups, found greedily."""
    left = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(choices, 2)
        for x in choices[a]
        for y in choices[b]
    }
    rows = []
    while left:
        row = dict(sorted(min(left, key=sorted)))
        for group in choices:
            if group not in row:
                row[group] = max(
                    choices[group],
                    key=lambda o: sum(frozenset([(group, o), p]) in left for p in row.items()),
                )
        left -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return rows


@pytest.mark.quick
def test_every_key_of_the_schema_has_a_commented_line_and_no_line_is_more():
    assert list(described_keys(CONF)) == list(schema_keys())


@pytest.mark.quick
def test_every_option_file_has_a_description():
    for group, options in groups().items():
        for option in options:
            assert re.search(r"\w+ \w+|^\w", description(CONF / group / f"{option}.yaml")), option


def test_few_combinations_hold_every_pair():
    choices = {"a": ["1", "2"], "b": ["1", "2", "3"], "c": ["1", "2"], "d": ["1"]}
    rows = all_pairs(choices)
    assert len(rows) <= 8
    for a, b in itertools.combinations(choices, 2):
        seen = {(row[a], row[b]) for row in rows}
        assert seen == set(itertools.product(choices[a], choices[b]))


def test_every_pair_of_options_of_different_groups_composes():
    rows = all_pairs(groups())
    seen = set()
    for row in rows:
        cfg = loaded([f"{group}={option}" for group, option in row.items()])
        seen |= set(row.items())
        assert cfg.model.name and cfg.optimizer.lr > 0
    assert seen == {(g, o) for g, options in groups().items() for o in options}


def test_mandatory_values_of_options_are_asked_for_all_at_once():
    typed = ["model=timm", "data=imagefolder", "optimizer=timm", "scheduler=multistep"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", typed)
    with pytest.raises(config.ConfigError) as e:
        config.load(cfg)
    assert e.value.problems == [f"{key} has no value: type {key}=..." for key in GIVEN]


@pytest.mark.quick
def test_the_options_of_an_experiment_yield_to_what_is_typed():
    cfg = loaded(["experiment=digits_baseline", "model=resnet18", "trainer.max_epochs=2"])
    assert (cfg.model.name, cfg.trainer.max_epochs) == ("resnet18", 2)
    assert cfg.run.tags == ["digits", "baseline"]


@pytest.fixture
def conf_with_local(tmp_path) -> Path:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    (conf / "local.yaml").write_text(
        "# @package _global_\ntrainer: {max_epochs: 7, log_every_n_steps: 77}\n"
        "data: {workers: 3}\nlogger: {mode: offline, project: mine}\n"
    )
    return conf


def test_local_yaml_is_optional(conf_with_local):
    (conf_with_local / "local.yaml").unlink()
    assert loaded([], conf_with_local).logger.project == "meshwork"


def test_local_yaml_wins_over_the_root_and_over_an_experiment(conf_with_local):
    assert loaded([], conf_with_local).trainer.max_epochs == 7
    cfg = loaded(["experiment=digits_baseline"], conf_with_local)
    assert (cfg.trainer.max_epochs, cfg.logger.project) == (7, "mine")


def test_debug_and_the_command_line_win_over_local_yaml(conf_with_local):
    cfg = loaded(["debug=overfit", "data.workers=1"], conf_with_local)
    assert (cfg.trainer.max_epochs, cfg.trainer.max_steps) == (None, 100)
    assert (cfg.trainer.log_every_n_steps, cfg.logger.mode) == (10, "disabled")
    assert (cfg.data.workers, cfg.logger.project) == (1, "mine")
