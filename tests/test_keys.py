"""Names from elsewhere lead home, and secrets stay out of the config."""

import re
from pathlib import Path

import pytest

from meshwork import cli, config, foreign
from meshwork.keys import is_secret, schema_keys

pytestmark = pytest.mark.quick

CONF = Path(__file__).parents[1] / "conf"


def problems(*argv: str) -> list[str]:
    return cli.read(list(argv), CONF).problems


SECRETS = [
    "+logger.api_key=canary",
    "--api-key=canary",
    "--wandb-api-key canary",
    "logger={api_key: canary}",
    "logger.args={api_key: canary}",
    "logger.args={a: [{hf_token: canary}]}",
    "logger.args={api_key: canary=x}",
    "model.args.hf_token=canary",
    "data.args.password=canary,x",
    "logger.args.secret=canary=x",
    "~logger.token=canary",
]


@pytest.mark.parametrize("typed", SECRETS)
def test_a_secret_is_refused_and_never_shown(typed):
    found = problems(*typed.split(" ", 1)) if typed.startswith("--") else problems(typed)
    assert len(found) == 1
    assert "is a secret and not kept in a config" in found[0]
    assert "canary" not in found[0]


def test_a_secret_of_the_environment_is_not_read_into_the_config(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary")
    for typed in ("+logger.api_key=${oc.env:WANDB_API_KEY}", "seed=${oc.env:WANDB_API_KEY}"):
        (found,) = problems(typed)
        assert "is a secret" in found and "canary" not in found


def test_names_of_secrets_are_told_from_names_of_tokens():
    for key in (
        "api_key",
        "apikey",
        "logger.api-key",
        "hf_token",
        "token",
        "auth_token",
        "password",
    ):
        assert is_secret(key), key
    for key in ("client_secret", "secret_key", "aws_secret_access_key", "wandb_api_key"):
        assert is_secret(key), key
    for key in ("use_cls_token", "class_token", "num_tokens", "pos_tokens", "reg_tokens", "key"):
        assert not is_secret(key), key
    assert not cli.read(["model.args.class_token=false"], CONF).problems


FOREIGN = """batch_size train_batch_size epochs num_epochs max_iters lr learning_rate wd num_workers
ckpt_path resume resume_from_checkpoint initial_checkpoint model_name img_size drop drop_path
smoothing opt sched clip_grad gradient_clip_val accumulate_grad_batches grad_accum_steps devices
num_nodes strategy amp log_interval check_val_every_n_epoch project output_dir monitor patience
model_ema""".split()


@pytest.mark.parametrize("name", FOREIGN)
def test_a_name_from_elsewhere_leads_home(name):
    home = foreign.KEYS.get(name)
    answer = f"meshwork says {home}" if home else f"{foreign.NOT_YET[name]} is not built yet"
    for key in (name, f"model.{name}", f"run.{name}"):
        if key not in schema_keys():
            typed = cli.read([f"+{key}=3", f"{key}=x"], CONF)
            assert typed.problems == [f"no key {key}: {answer}"] * 2


def test_every_key_that_a_name_from_elsewhere_leads_to_exists():
    known, groups = schema_keys(), config.option_files(CONF)
    for name, home in foreign.KEYS.items():
        if home.startswith("torchrun "):
            continue
        keys = re.findall(r"\b[a-z_]+\.[a-z_]+\b", home)
        options = re.findall(r"(?<![.\w])([a-z_]+)=", home)
        assert keys or options, name
        assert set(keys) <= set(known), name
        assert set(options) <= set(groups), name


OPTIONS = [
    ("parallel", "none", "ddp"),
    ("parallel", "single", "ddp"),
    ("parallel", "dp", "ddp"),
    ("parallel", "fsdp2", "fsdp"),
    ("parallel", "tp", "tensor"),
    ("parallel", "pp", "pipeline"),
    ("logger", "csv", "none"),
    ("logger", "jsonl", "none"),
    ("launcher", "submitit", "slurm"),
    ("launcher", "basic", "local"),
    ("optimizer", "adam", "adamw"),
]


@pytest.mark.parametrize(("group", "option", "home"), OPTIONS)
def test_an_option_from_elsewhere_leads_home_where_that_exists(group, option, home, tmp_path):
    (tmp_path / group).mkdir()
    (tmp_path / group / "other.yaml").touch()
    typed = f"{group}={option}"
    (answer,) = cli.read([typed], tmp_path).problems
    assert answer.startswith(f"no option {typed}: ") and answer.endswith("options are other")
    (tmp_path / group / f"{home}.yaml").touch()
    (answer,) = cli.read([typed], tmp_path).problems
    assert answer.startswith(f"no option {typed}: meshwork says {group}={home}")
