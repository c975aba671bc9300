"""Every key of a config, the sentence for one that is none, and which names are secrets."""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from meshwork import foreign
from meshwork.schema import OPEN, Config

SECRET = re.compile(
    r"(.*_)?(api_?key|(secret|private|access)_key|password|passwd|passphrase|secret|credentials?)"
    r"|(.*_)?(access|auth|api|hf|hub|github|wandb|bearer|secret)_token|token",
    re.IGNORECASE,
)


def schema_keys(schema: type = Config, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of the schema with its type; a group is listed by its keys alone."""
    keys = {}
    for name, kind in get_type_hints(schema).items():
        key = prefix + name
        keys |= schema_keys(kind, f"{key}.") if is_dataclass(kind) else {key: kind}
    return keys


def is_open(key: str) -> bool:
    """Whether any key may be typed here: `model.args.patch_size`."""
    return any(key.startswith(f"{k}.") for k in OPEN)


def unknown_key(key: str, known: Iterable[str] = ()) -> str:
    """The sentence for a key that is not in the schema, with the nearest of `known` (none: of the
    schema): of those whose last part is spelled most alike the one that is most alike itself."""
    last = _last(key)
    if is_secret(key):
        return secret_key(key)
    if last in foreign.KEYS:
        return f"no key {key}: meshwork says {foreign.KEYS[last]}"
    if last in foreign.NOT_YET:
        return f"no key {key}: {foreign.NOT_YET[last]} is not built yet"
    known = list(known) or list(schema_keys())
    like = difflib.get_close_matches(last, map(_last, known), 1, cutoff=0.7)
    near = difflib.get_close_matches(key, [k for k in known if _last(k) in like], 1, cutoff=0)
    return f"no key {key}: " + (
        f"did you mean {near[0]}?" if near else "python train.py --help lists every key"
    )


def is_secret(key: str) -> bool:
    """Whether a key's last part names a secret: api_key, hf_token; use_cls_token is none."""
    return bool(SECRET.fullmatch(_last(key).replace("-", "_")))


def secret_key(key: str) -> str:
    """The sentence for a secret in the config, without its value."""
    return (
        f"{key} is a secret and not kept in a config: export it in the environment "
        "(W&B: WANDB_API_KEY) and drop this key"
    )


def secrets_in(value: Any, key: str) -> Iterator[str]:
    """Secrets in an unresolved value: keys that name one, and `${oc.env:...}` that reads one."""
    if isinstance(value, dict):
        for name, inner in value.items():
            dotted = f"{key}.{name}"
            yield from [dotted] if is_secret(dotted) else secrets_in(inner, dotted)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from secrets_in(inner, f"{key}[{i}]")
    elif isinstance(value, str):
        names = re.findall(r"oc\.env:\s*([^,}\s]+)", value)
        yield from (f"{key}=${{oc.env:{name}}}" for name in names if is_secret(name))


def _last(key: str) -> str:
    return key.rsplit(".", 1)[-1]
