"""`--help` names everything that can be typed, at once."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwork import cli, config
from meshwork.helptext import described_keys
from meshwork.keys import schema_keys

pytestmark = pytest.mark.quick

CONF = Path(__file__).parents[1] / "conf"


def test_help_names_every_key_and_every_option_with_a_description():
    lines = cli.help_text(CONF).splitlines()
    described = {key for line in lines if (key := re.match(r"  ([\w.]+)=.* \w", line))}
    assert set(schema_keys()) <= {m[1] for m in described}
    for group, options in config.option_files(CONF).items():
        for option in options:
            assert any(re.match(rf"  {group}={option} +\w.*\w", line) for line in lines), option
    assert all(len(text) > 3 for _, text in described_keys(CONF).values())


def test_help_takes_less_than_two_seconds_and_no_torch():
    start = time.monotonic()
    command = [sys.executable, "-X", "importtime", str(CONF.parent / "train.py"), "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - start < 2
    assert run.returncode == 0 and "optimizer.lr=1e-3" in run.stdout
    assert not re.search(r"\| +torch$", run.stderr, re.MULTILINE)
