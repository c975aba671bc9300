"""Before a run: the command line checked as a whole, and errors turned into sentences and exit
codes."""

import secrets
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from meshwork import cli, config
from meshwork.config import ConfigError
from meshwork.ranks import BY_HAND, Ranks

PATIENCE_S = 15.0
STOPPED = 75  # the exit code of a run that was asked to stop: not done, try again later


class Reported(Exception):
    """A failure that has been told already; code: how the process is to exit."""

    def __init__(self, code: int):
        super().__init__(f"exit code {code}")
        self.code = code


@dataclass
class Outcome:
    """How a block of `sentences` went. code: 0, 1 failure, 2 wrong input."""

    ranks: Ranks | None
    code: int = 0
    objective: float | None = None


@contextmanager
def sentences(ranks: Ranks | None) -> Iterator[Outcome]:
    """Turn what goes wrong inside into sentences, once a job, and an exit code.

    Rank 0 speaks for what every rank finds; the others wait a while before they leave, else
    torchrun ends rank 0 in mid-sentence.
    """
    outcome = Outcome(ranks)
    try:
        yield outcome
    except Reported as e:
        outcome.code = e.code
    except ConfigError as e:
        outcome.code = 2
        _speak(e.problems, outcome.ranks)
    except (HydraException, OmegaConfBaseException) as e:
        outcome.code = 2
        _speak([" ".join(str(e).split())], outcome.ranks)
    except KeyboardInterrupt:
        outcome.code = 130


def _speak(problems: list[str], ranks: Ranks | None) -> None:
    if ranks is None or ranks.rank == 0:
        cli.complain(problems)
    elif ranks.source != BY_HAND:  # nobody ends the other ranks of those started by hand
        time.sleep(PATIENCE_S)


def check_typed(typed: cli.Typed, ranks: Ranks, conf: Path) -> None:
    """Raise ConfigError with every problem of the command line at once.

    What Hydra's composition and the schema find in the rest of it is listed along.
    """
    if typed.multirun and ranks.world_size > 1:
        plain = shlex.join(typed.argv)
        raise ConfigError(
            f"a sweep (-m) inside {ranks.source} would run every job in each of the "
            f"{ranks.world_size} processes. Type: python train.py {plain}"
        )
    if typed.problems:
        from hydra import compose, initialize_config_dir

        with initialize_config_dir(str(conf), version_base="1.3"):
            try:
                cfg = compose("train", typed.good)
            except (HydraException, OmegaConfBaseException):
                raise ConfigError(*typed.problems) from None
        config.load(cfg, typed.problems)


def sweep_folder(typed: cli.Typed) -> list[str]:
    """The override that names a sweep's folder, where it is a sweep and nobody typed one."""
    if not typed.multirun or any(a.startswith("hydra.sweep.dir=") for a in typed.argv):
        return []
    stamp = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(4)}"
    return [f"hydra.sweep.dir=multirun/{stamp}"]
