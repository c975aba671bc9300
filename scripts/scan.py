"""Read every image below a folder and list the broken ones: python scripts/scan.py ROOT."""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from meshwork.data.imagefolder import read_image
from meshwork.data.loader import BadImage
from meshwork.data.table import scan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", help="folder of images")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that read")
    args = parser.parse_args()
    try:
        table = scan(args.root, by_class=False)
    except OSError as error:
        parser.error(f"cannot list {args.root}: {error.strerror}")
    paths = [table.path(index) for index in range(len(table))]
    with ProcessPoolExecutor(args.workers) as pool:
        bad = [reason for reason in pool.map(problem, paths, chunksize=64) if reason]
    for line in bad:
        print(line)
    left_out = ", ".join(f"{n} {kind}" for kind, n in table.left_out.items()) or "nothing"
    print(f"{len(paths)} images, {len(bad)} of them bad; left out: {left_out}")
    return 1 if bad else 0


def problem(path: bytes) -> str | None:
    """Why the file cannot be read, with its path; None where it can."""
    try:
        read_image(path, "RGB")
    except BadImage as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
