"""What a person types reaches the config as typed, or is answered by one sentence a problem."""

import random
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from meshwork import cli, config
from meshwork.overrides import quoted

pytestmark = pytest.mark.quick

CONF = Path(__file__).parents[1] / "conf"


def composed(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides)


def loaded(*argv: str) -> config.Config:
    """The config of a command line, through Hydra's own parser and composition."""
    typed = cli.read(list(argv), CONF)
    return config.load(composed(typed.good), typed.problems)


def problems(*argv: str) -> list[str]:
    with pytest.raises(config.ConfigError) as e:
        loaded(*argv)
    return e.value.problems


HOME = str(Path.home())
PATHS_AS_TYPED = [
    ("/data/birds", "/data/birds"),
    ("~/birds", f"{HOME}/birds"),
    ("$HOME/birds", f"{HOME}/birds"),
    ("${oc.env:HOME}/birds", f"{HOME}/birds"),
    ("/tmp/epoch=3-val_loss=0.12", "/tmp/epoch=3-val_loss=0.12"),
    ("/tmp/epoch\\=3", "/tmp/epoch=3"),
    ('"/tmp/epoch=3"', "/tmp/epoch=3"),
    ("'/tmp/epoch=3'", "/tmp/epoch=3"),
    ("/my images/of birds", "/my images/of birds"),
    ("/a,b", "/a,b"),
    ("/a(b)[c]{d}", "/a(b)[c]{d}"),
    ("/tmp/模型/x", "/tmp/模型/x"),
    ("/a/it's", "/a/it's"),
    ('/a/"b"/c', '/a/"b"/c'),
    ("/a/b\\", "/a/b\\"),
    ("/a#b;c&d|e!f*g?", "/a#b;c&d|e!f*g?"),
    ("/a:b@c%d+e", "/a:b@c%d+e"),
]


@pytest.mark.parametrize(("typed", "path"), PATHS_AS_TYPED, ids=[t for t, _ in PATHS_AS_TYPED])
def test_a_path_arrives_as_typed(typed, path):
    cfg = loaded(f"data.root={typed}", f"+checkpoint.resume={typed}")
    assert cfg.data.root == cfg.checkpoint.resume == path


def test_a_relative_path_that_looks_like_something_else_is_a_path_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("007", "1e3", "true", "[a]", "{a:b}", "birds", "a b"):
        assert loaded(f"data.root={name}").data.root == str(tmp_path / name)


def test_any_path_survives_the_command_line():
    draw = random.Random(0)
    keys = ("run.dir", "run.root", "data.root", "data.predict_root", "checkpoint.resume")
    for _ in range(30):
        paths = {k: f"/x/{_drawn(draw, 9).strip()}z" for k in keys}
        overrides = cli.read([f"{k}={path}" for k, path in paths.items()], CONF).good
        cfg = composed(overrides)
        assert {k: OmegaConf.select(cfg, k) for k in keys} == paths


def _drawn(draw: random.Random, longest: int) -> str:
    """A text of odd characters without what Hydra's grammar takes as an escape."""
    text = "".join(draw.choices("ab1 =,'\"\\[](){}:;~#%*?é", k=draw.randint(1, longest)))
    return re.sub(r"\\[\\()\[\]{}:=, \t]", "", text)


def test_any_text_survives_quoting_with_either_mark():
    draw = random.Random(1)
    for _ in range(20):
        text = "".join(draw.choices("a'\"\\ =,", k=draw.randint(0, 8)))
        one, two = quoted(text, "'"), quoted(text, '"')
        cfg = composed([f"run.notes={one}", f"run.name={two}"])
        assert cfg.run.notes == cfg.run.name == text


def test_the_words_beside_a_path_stay_words_and_null_stays_null():
    assert loaded("checkpoint.resume=never").checkpoint.resume == "never"
    assert loaded("checkpoint.resume=auto").checkpoint.resume == "auto"
    assert loaded("data.root=null").data.root is None


def test_an_empty_path_is_refused():
    assert problems("data.root=") == [
        "data.root= has no value: type a path, or null where there is none"
    ]


def test_text_that_looks_like_a_number_stays_text():
    cfg = loaded("run.id=12e4", "run.name=007", "run.notes=true")
    assert (cfg.run.id, cfg.run.name, cfg.run.notes) == ("12e4", "007", "true")


def test_keys_below_args_need_no_plus_sign():
    cfg = loaded("model.args.patch_size=4", "model.args.x=1", "+model.args.y=2", "data.args.a.b=3")
    assert cfg.model.args == {"patch_size": 4, "x": 1, "y": 2}
    assert cfg.data.args == {"a": {"b": 3}}
    assert loaded("model.args={x: 1}").model.args == {"patch_size": 8, "x": 1}
    assert loaded("~model.args.patch_size").model.args == {}


def test_a_criterion_is_typed_plainly():
    cfg = loaded("task.criterion._target_=torch.nn.CrossEntropyLoss", "task.criterion.eps=1")
    assert cfg.task.criterion == {"_target_": "torch.nn.CrossEntropyLoss", "eps": 1}
    cfg = loaded("task.criterion={_target_: torch.nn.MultiMarginLoss}")
    assert cfg.task.criterion == {"_target_": "torch.nn.MultiMarginLoss"}


def test_a_plus_sign_on_a_known_key_does_no_harm():
    cfg = loaded("+trainer.max_epochs=3", "++seed=4", "+model=resnet18")
    assert (cfg.trainer.max_epochs, cfg.seed, cfg.model.name) == (3, 4, "resnet18")


def test_flags_may_stand_anywhere_and_an_injected_rank_flag_is_dropped():
    typed = cli.read(
        [
            "optimizer.lr=0.1,0.01",
            "--local-rank=0",
            "-m",
            "seed=1",
            "--cfg",
            "job",
            "--local_rank=3",
        ],
        CONF,
    )
    assert typed.argv == ["-m", "--cfg", "job", "optimizer.lr=0.1,0.01", "seed=1"]
    assert typed.good == ["optimizer.lr=0.1", "seed=1"]
    assert typed.multirun and not typed.problems


def test_a_sweep_over_paths_and_options_is_kept():
    typed = cli.read(["--multirun", "data.root=~/a=1,/b", "model=test_vit,resnet18"], CONF)
    assert typed.argv[1:] == [f"data.root='{HOME}/a=1','/b'", "model=test_vit,resnet18"]
    assert typed.good == [f"data.root='{HOME}/a=1'", "model=test_vit"]
    for sweep in (
        "model=glob(*)",
        "seed=range(1,4)",
        "optimizer.lr=interval(0.1,1)",
        "data=choice(digits)",
    ):
        assert cli.read(["-m", sweep], CONF).argv == ["-m", sweep]


def test_shell_completion_is_left_to_hydra():
    assert cli.read(["-sc", "install=bash"], CONF).argv == ["-sc", "install=bash"]


SENTENCES = [
    ("hydra.ouput_subdir=x", "no key hydra.ouput_subdir: did you mean hydra.output_subdir?"),
    ("hydra.job.chdri=true", "no key hydra.job.chdri: did you mean hydra.job.chdir?"),
    (
        "hydra.run.dir=/x",
        "hydra.run.dir is not used: run.dir is the exact run folder, run.root where they are made",
    ),
    (
        "optimzer.weight_decay=1",
        "no key optimzer.weight_decay: did you mean optimizer.weight_decay?",
    ),
    ("optimizer.lrr=0.1", "no key optimizer.lrr: did you mean optimizer.lr?"),
    ("trainer.seed=1", "no key trainer.seed: did you mean seed?"),
    ("~trainer.seed", "no key trainer.seed: did you mean seed?"),
    ("+model.patch=1", "no key model.patch: python train.py --help lists every key"),
    ("modle=resnet18", "no key modle: did you mean model=resnet18?"),
    ("optimizer.lr=abc", "optimizer.lr=abc: expected a number"),
    ("trainer.max_epochs=1.5", "trainer.max_epochs=1.5: expected a whole number or null"),
    ("trainer.deterministic=maybe", "trainer.deterministic=maybe: expected true or false"),
    ("seed=-1", f"seed=-1: expected 0 to {2**63 - 1}"),
    (
        "~trainer.max_epochs",
        "~trainer.max_epochs: a key is not deleted but set, to null for example: "
        "trainer.max_epochs=null",
    ),
    ("--optimizer.lr=0.1", "--optimizer.lr=0.1: overrides have no dashes: optimizer.lr=0.1"),
    (
        "--batch-size=64",
        "--batch-size: overrides are typed key=value, without dashes, and no key batch_size: "
        "meshwork says trainer.global_batch_size, over all ranks",
    ),
    ("seed", "seed is not an override: expected key=value"),
    (
        "run.notes=a=b",
        "run.notes=a=b is not an override that Hydra can read: quote a value that holds special "
        "characters: 'run.notes=\"a=b\"'",
    ),
    ("seed=1,2", "seed=1,2 is several values: add -m to run one job for each"),
    (
        "run.notes=a, b",
        "run.notes=a, b is several values: add -m to run one job for each, or quote a text that "
        "holds a comma: 'run.notes=\"a, b\"'",
    ),
    (
        "run.tags=a,b",
        "run.tags=a,b is several values: add -m to run one job for each, or give one list: "
        "'run.tags=[a,b]'",
    ),
    (
        "trainer=5",
        "trainer=5: trainer is a group of keys: type trainer.KEY=VALUE",
    ),
    (
        "optimizer={lr: 1}",
        "optimizer={...}: optimizer is a group: name one option, adamw, sgd, timm, or type "
        "its keys one by one, optimizer.KEY=VALUE",
    ),
    ("seed=${nope.y}", "seed=${nope.y} cannot be resolved: Interpolation key 'nope.y' not found"),
]


@pytest.mark.parametrize(("typed", "sentence"), SENTENCES, ids=[t for t, _ in SENTENCES])
def test_a_wrong_override_is_answered_by_one_sentence(typed, sentence):
    assert problems(typed) == [sentence]


def test_an_unknown_option_is_answered_by_the_nearest_and_the_list():
    assert problems("model=resnet19") == [
        "no option model=resnet19: did you mean model=resnet18? options are "
        + ", ".join(config.option_files(CONF)["model"])
    ]
    assert problems("launcher=zzz")[0].startswith("no option launcher=zzz: options are ")


def test_all_problems_are_listed_at_once():
    found = problems(
        "optimzer.lr=0.1", "parallel=fspd", "optimizer.lr=abc", "data=imagefolder", "seed=-1"
    )
    assert len(found) == 5
    for start in ("no key optimzer.lr", "no option parallel=fspd", "optimizer.lr=abc", "seed=-1"):
        assert any(p.startswith(start) for p in found)
    assert "data.root has no value: type data.root=..." in found


@pytest.mark.parametrize("value", ["a=b", "x, y", 'say "a=b"', "it's a=b", "a=b\\", "(a"])
def test_the_quoted_form_of_a_sentence_works(value):
    quoted_form = problems(f"run.notes={value}")[0].rsplit(": ", 1)[1]
    (typed,) = shlex.split(quoted_form)
    assert loaded(typed).run.notes == value


def test_help_is_asked_for_by_either_flag():
    assert cli.wants_help(["seed=1", "--help"]) and cli.wants_help(["-h"])
    assert not cli.wants_help(["seed=1", "--hydra-help"])


def test_problems_are_printed_one_a_line(capsys):
    cli.complain(["one", "two"])
    assert capsys.readouterr().err == "error: one\nerror: two\n"
