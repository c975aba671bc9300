"""Give a fork its own name: python scripts/rename.py NEWNAME

Renames package, imports, config, environment variables and docs. README.md becomes
docs/TEMPLATE.md, word for word, and the stub scripts/README.fork.md takes its place. LICENSE keeps
the notice that it asks to keep.
"""

import argparse
import importlib.util
import keyword
import re
import subprocess
import sys
from pathlib import Path

OLD = "meshwork"
ROOT = Path(__file__).resolve().parents[1]
TEMPLATE, STUB, README = "docs/TEMPLATE.md", "scripts/README.fork.md", "README.md"
KEPT = ("LICENSE", TEMPLATE)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="the new import name: lower case, digits and underscores")
    parser.add_argument("--force", action="store_true", help="also with uncommitted changes")
    args = parser.parse_args(argv)
    if problem := problem_with(args.name) or (None if args.force else dirty()):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    rename(args.name)
    print(f"{OLD} is {args.name} now: make install, make format, then git add -A and commit")
    return 0


def problem_with(name: str) -> str | None:
    """Why a package cannot have this name, or None."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        return f"{name} is no package name: expected lower case letters, digits and underscores"
    if name == OLD:
        return f"{name} is the name already"
    taken = name in sys.stdlib_module_names or importlib.util.find_spec(name)
    if taken or (ROOT / name).exists() or (ROOT / f"{name}.py").exists():
        return f"{name} is the name of something else that Python can import: choose another"
    return None


def dirty() -> str | None:
    """Why the tree is not ready, or None: a rename that went wrong must be easy to take back."""
    if changes := git("status", "--porcelain"):
        n = len(changes.splitlines())
        return f"{n} files have uncommitted changes: commit them first, or add --force"
    return None


def rename(name: str) -> None:
    """Rename in every file that git knows or would add, then the files themselves."""
    if (ROOT / STUB).exists():
        (ROOT / TEMPLATE).parent.mkdir(exist_ok=True)
        if (ROOT / README).exists():
            (ROOT / README).rename(ROOT / TEMPLATE)
        text = (ROOT / STUB).read_text(encoding="utf-8")
        (ROOT / README).write_text(text.replace("{name}", name), encoding="utf-8")
        (ROOT / STUB).unlink()
    for path in git("ls-files", "-co", "--exclude-standard", "-z").split("\0"):
        if path and path not in KEPT and (ROOT / path).is_file():
            rename_in(ROOT / path, name)
            move(path, renamed(path, name))
    for folder in sorted(ROOT.glob(f"src/**/*{OLD}*/"), reverse=True):
        remove_caches(folder)


def rename_in(path: Path, name: str) -> None:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return  # a picture or the like
    if (new := renamed(text, name)) != text:
        path.write_bytes(new.encode())


def renamed(text: str, name: str) -> str:
    """A text with the old name, in lower and upper case and as a title, replaced."""
    for old, new in ((OLD, name), (OLD.upper(), name.upper()), (OLD.title(), name.title())):
        text = text.replace(old, new)
    return text


def move(old: str, new: str) -> None:
    if old != new:
        (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / old).rename(ROOT / new)


def remove_caches(folder: Path) -> None:
    """Remove what is left of a moved folder: compiled files and empty folders, nothing else."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.suffix == ".pyc":
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    if not any(folder.iterdir()):
        folder.rmdir()


def git(*args: str) -> str:
    command = ["git", "-C", str(ROOT), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
