"""Put what the benchmark needs into the running virtual environment, once."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent / "requirements-bench.txt"


def missing_requirements(text: str) -> list[str]:
    """Return the pins of a requirements file that are not installed in just that version."""
    missing = []
    for line in text.splitlines():
        pin = line.partition("#")[0].strip()
        if not pin or pin.startswith("-"):
            continue
        name, _, version = pin.partition("==")
        try:
            if metadata.version(name) != version:
                missing.append(pin)
        except metadata.PackageNotFoundError:
            missing.append(pin)
    return missing


def install_requirements() -> None:
    """Install what is missing.

    Raises:  subprocess.CalledProcessError
    """
    missing = missing_requirements(REQUIREMENTS.read_text())
    if not missing:
        return
    print(f"installing {', '.join(missing)}", flush=True)
    # --no-deps: the file is complete, and must not move what requirements.txt pins
    argv = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*argv, "-r", str(REQUIREMENTS)], check=True)
