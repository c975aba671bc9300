"""The typed configuration: `load` turns a composed config into dataclasses, or lists every problem.

The dataclasses themselves are in schema.py. No torch here: a wrong key is answered before anything
heavy is imported.
"""

import difflib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

from meshwork.keys import secret_key, secrets_in, unknown_key
from meshwork.schema import CHOICES, PATHS, RANGES
from meshwork.schema import Augment as Augment
from meshwork.schema import Checkpoint as Checkpoint
from meshwork.schema import Config as Config
from meshwork.schema import Data as Data
from meshwork.schema import Logger as Logger
from meshwork.schema import Model as Model
from meshwork.schema import Objective as Objective
from meshwork.schema import Optimizer as Optimizer
from meshwork.schema import Parallel as Parallel
from meshwork.schema import Run as Run
from meshwork.schema import Runtime as Runtime
from meshwork.schema import Scheduler as Scheduler
from meshwork.schema import Task as Task
from meshwork.schema import Trainer as Trainer


class ConfigError(Exception):
    """Wrong input, said in one sentence a problem: found, expected, which key to change."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class Failure(Exception):
    """What went wrong while running, said in a sentence."""


def load(cfg: DictConfig, problems: Iterable[str] = ()) -> Config:
    """The composed config as typed dataclasses, interpolations resolved, paths absolute.

    problems: what was found before, so that everything is listed at once.
    Raises ConfigError with one sentence a problem: unknown keys (with the nearest), wrong types,
    missing values, values out of range, secrets.
    """
    typed = OmegaConf.structured(Config)
    raw = OmegaConf.to_container(cfg, resolve=False)
    found = [*problems, *_problems(cfg, raw, Config, typed)]
    if not found:
        for key, words in PATHS.items():
            value = OmegaConf.select(typed, key)
            if value is not None and value not in words:
                OmegaConf.update(typed, key, absolute(value))
        if typed.checkpoint.resume not in PATHS["checkpoint.resume"]:
            # The link outputs/latest: this run will point it to itself.
            typed.checkpoint.resume = os.path.realpath(typed.checkpoint.resume)
        config = OmegaConf.to_object(typed)
        found = list(_problems_together(config))
    if found:
        raise ConfigError(*dict.fromkeys(found))
    return config


def saved_model(file: Path) -> Model:
    """The model group of a run's config.yaml, whatever the other groups have.

    A run's config is resolved: an interpolation in it could call what a notebook has registered,
    and is refused. Raises ConfigError naming the file.
    """
    try:
        group = OmegaConf.load(file)["model"]
        raw = OmegaConf.to_container(group, resolve=False)
        if "${" in OmegaConf.to_yaml(group):
            raise ValueError("model holds an interpolation ${...}")
    except Exception as e:  # YAML's errors and OmegaConf's have no common kind
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ConfigError(
            f"{file} cannot be read ({reason}): expected the config.yaml that a run has written"
        ) from e
    typed = OmegaConf.structured(Model)
    if found := list(_problems(group, raw, Model, typed, "model.")):
        raise ConfigError(*(f"{file}: {problem}" for problem in found))
    return OmegaConf.to_object(typed)


def resolved_yaml(cfg: Config) -> str:
    """The config as YAML, every value resolved."""
    return OmegaConf.to_yaml(OmegaConf.structured(cfg))


def absolute(path: str) -> str:
    """A path as typed, `~` and `$VAR` expanded, made absolute from the working directory."""
    return os.path.abspath(os.path.expandvars(os.path.expanduser(path)))


def option_files(conf: Path) -> dict[str, list[str]]:
    """Groups of conf/ with their options: {"model": ["resnet18", ...], ...}."""
    groups = sorted(g for g in conf.iterdir() if g.is_dir())
    return {g.name: sorted(f.stem for f in g.glob("*.yaml")) for g in groups}


def type_name(kind: Any) -> str:
    """A type as a person says it: `Optional[int]` is "a whole number or null"."""
    if get_origin(kind) is Union:
        return " or ".join(type_name(k) for k in get_args(kind))
    if get_origin(kind) is list:
        return f"a list [...] of {type_name(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "keys with values {key: value}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, "null")


def _problems(
    cfg: DictConfig, raw: dict, schema: type, typed: DictConfig, prefix: str = ""
) -> Iterator[str]:
    """A sentence for each key that does not suit the schema; those that do are set in `typed`.

    raw: `cfg` as plain containers with its interpolations left alone; this is what sentences show.
    """
    names = {f.name for f in fields(schema)}
    yield from (unknown_key(f"{prefix}{name}") for name in raw if name not in names)
    for name, kind in get_type_hints(schema).items():
        key = prefix + name
        if name not in raw:
            yield f"{key} has no value: type {key}=..."
        elif not is_dataclass(kind):
            secrets = [secret_key(k) for k in secrets_in(raw[name], key)]
            yield from secrets or _value_problems(cfg, key, raw[name], kind, typed)
        elif isinstance(raw[name], dict):
            typed[name] = kind
            yield from _problems(cfg[name], raw[name], kind, typed[name], f"{key}.")
        else:
            yield f"{key}={_shown(raw[name])}: {key} is a group of keys: type {key}.KEY=VALUE"


def _value_problems(
    cfg: DictConfig, key: str, raw: Any, kind: Any, typed: DictConfig
) -> Iterator[str]:
    name = key.rsplit(".", 1)[-1]
    try:
        value = cfg[name]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        typed[name] = value
    except MissingMandatoryValue as e:
        yield f"{e.full_key or key} has no value: type {e.full_key or key}=..."
    except ValidationError:
        yield f"{key}={_shown(raw)}: expected {type_name(kind)}"
    except OmegaConfBaseException as e:
        yield f"{key}={_shown(raw)} cannot be resolved: {str(e).splitlines()[0]}"
    else:
        yield from _choice_problems(key, typed[name])
        yield from _range_problems(key, typed[name])


def _choice_problems(key: str, value: Any) -> Iterator[str]:
    if key in CHOICES and value is not None and value not in CHOICES[key]:
        near = difflib.get_close_matches(value, CHOICES[key], 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        yield f"{key}={value}: expected {', '.join(CHOICES[key])}{hint}"


def _range_problems(key: str, value: Any) -> Iterator[str]:
    if key not in RANGES or value is None:
        return
    low, high = RANGES[key]
    numbers = value if OmegaConf.is_list(value) else [value]
    if not all(math.isfinite(n) and low <= n and (high is None or n <= high) for n in numbers):
        limits = f"at least {low}, and finite" if high is None else f"{low} to {high}"
        yield f"{key}={_shown(value)}: expected {limits}"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _problems_together(cfg: Config) -> Iterator[str]:
    """Problems between keys, asked once each key alone is right."""
    if cfg.trainer.max_epochs is None and cfg.trainer.max_steps is None:
        yield "trainer.max_epochs and trainer.max_steps are both null: give one of them"
    if cfg.scheduler.warmup_steps is not None and cfg.scheduler.warmup_epochs is not None:
        yield (
            "scheduler.warmup_steps and scheduler.warmup_epochs are both given: "
            "set one of them to null"
        )
    for key in ("scale", "ratio"):
        pair = getattr(cfg.data.augment, key)
        if pair is not None and (len(pair) != 2 or pair[0] > pair[1]):
            yield f"data.augment.{key}={pair}: expected [smallest, largest]"
    if not isinstance(cfg.dry_run, bool) and cfg.dry_run < 1:
        yield f"dry_run={cfg.dry_run}: expected true, false or a number of ranks"
    if cfg.data.predict_root is not None and cfg.data._target_.endswith("digits"):
        yield "data.predict_root needs image files: add data=imagefolder data.root=..."
