"""`run.reopen=RUN`: the command line of a run that goes on in its folder. No torch."""

import json
from pathlib import Path

from meshwork.config import ConfigError, absolute

# What a run was told for one start alone.
ONCE = ("run.dir", "run.id", "run.root", "checkpoint.resume", "trainer.stop_at_step", "mode")
ONCE += ("dry_run", "run.reopen")


def key_of(override: str) -> str:
    """The key or group of an override."""
    return override.lstrip("+~").split("=", 1)[0]


def reopened(overrides: list[str]) -> tuple[list[str], list[str]]:
    """(overrides of the run that `run.reopen` names, those typed): the first are read already.

    The folder's own overrides come first, without those typed again. Raises ConfigError where the
    folder is no run's.
    """
    typed = [o for o in overrides if key_of(o) == "run.reopen" and not o.endswith("=null")]
    if not typed:
        return [], overrides
    folder = Path(absolute(typed[-1].split("=", 1)[1].strip("'\"")))
    try:
        saved = json.loads((folder / "status.json").read_text())["overrides"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            f"run.reopen={folder} is not the folder of a run ({type(e).__name__} at "
            f"{folder / 'status.json'}): expected one as outputs/<start>_<id>"
        ) from e
    again = {key_of(o) for o in overrides}
    if wrong := again & {"run.dir", "run.id"}:
        raise ConfigError(f"run.reopen names the run's folder already: leave out {wrong.pop()}")
    kept = [o for o in saved if key_of(o) not in again and key_of(o) not in ONCE]
    return kept, [*overrides, f"run.dir={folder.resolve()}"]
