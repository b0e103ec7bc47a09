"""Check each input of a corpus once, to see what of the package it reaches: `python -m tests.fuzz.replay FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from .findings import failure_of
from .targets import TARGETS


def main() -> None:
    corpus = Path(sys.argv[1])
    for target in TARGETS.values():
        for path in sorted((corpus / target.name).iterdir()):
            failure_of(target, path.read_bytes())


if __name__ == "__main__":
    main()
