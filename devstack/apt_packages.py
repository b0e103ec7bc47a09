"""Install RabbitMQ and Redis with apt, as programs only: no service of theirs is started or enabled.

Two stages. Downloading can be interrupted at any second. Unpacking cannot, since a killed dpkg leaves a broken system:
it runs in a process of its own (`python -m devstack.apt_packages`), which no Ctrl-C reaches and which finishes, and
tidies up, even when its parent is killed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from devstack import processes

PACKAGES = ("rabbitmq-server", "redis-server")
#: what those packages, and the Erlang below RabbitMQ, would start and enable
UNITS = ("rabbitmq-server.service", "redis-server.service", "epmd.service", "epmd.socket")
#: the users those units run as; the packages make them
SERVICE_USERS = ("rabbitmq", "redis", "epmd")
UNIT_FOLDERS = (Path("/lib/systemd/system"), Path("/usr/lib/systemd/system"))
#: invoke-rc.d and deb-systemd-invoke ask this program; 101 forbids
POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_TEXT = "#!/bin/sh\n# inference_worker devstack: temporary, forbids packages to start services\nexit 101\n"

APT_GET = ("apt-get", "-qq", "-y", "-o", "DPkg::Lock::Timeout=120")
UPDATE_TIMEOUT_S = 180.0
DOWNLOAD_TIMEOUT_S = 600.0
UNPACK_TIMEOUT_S = 600.0


class InstallFailed(Exception):
    """apt could not do it; the text ends with what apt said. Raised by `install`; the caller tries another way."""


def usable() -> bool:
    """Tell whether this is Debian or Ubuntu, and we are root."""
    return os.geteuid() == 0 and Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None


def install(*, say: Callable[[str], None]) -> None:
    """Install what is missing of `PACKAGES`.

    Raises:  InstallFailed
    """
    say(f"devstack: installing {' and '.join(PACKAGES)} with apt, once; no system service will be started or enabled")
    folder = processes.make_folder("apt")
    try:
        download(folder / "download.log")
        unpack(folder / "unpack.log", say=say)
    finally:
        processes.remove_folder(folder)


def download(log_path: Path) -> None:
    """Fetch the packages, and the lists first when they are missing or too old to fetch by."""
    fetch = (*APT_GET, "install", "--no-install-recommends", "--download-only", *PACKAGES)
    try:
        run_apt(fetch, log_path=log_path, timeout_s=DOWNLOAD_TIMEOUT_S)
    except InstallFailed:
        run_apt((*APT_GET, "update"), log_path=log_path, timeout_s=UPDATE_TIMEOUT_S)
        run_apt(fetch, log_path=log_path, timeout_s=DOWNLOAD_TIMEOUT_S)


def run_apt(argv: tuple[str, ...], *, log_path: Path, timeout_s: float) -> None:
    """Run an apt command that may be ended at any time."""
    child = processes.spawn(argv, env=apt_environment(), log_path=log_path)
    try:
        exit_code = child.wait(timeout_s=timeout_s)
    except processes.NotInTime as err:
        raise InstallFailed(str(err)) from err
    finally:
        child.end()
    if exit_code:
        raise InstallFailed(f"`{' '.join(argv)}` said: {child.log()[-1000:].strip()}")


def unpack(log_path: Path, *, say: Callable[[str], None]) -> None:
    """Let the uninterruptible process install the downloaded packages; when we are interrupted, wait for it."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "devstack.apt_packages"],
            cwd=Path(__file__).parent.parent,
            env=apt_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        exit_code = process.wait(UNPACK_TIMEOUT_S)
    except subprocess.TimeoutExpired as err:
        raise InstallFailed(f"unpacking took over {UNPACK_TIMEOUT_S:g} s") from err
    except BaseException:
        say("devstack: interrupted; a half-done installation would break apt, so it is finished first")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(UNPACK_TIMEOUT_S)
        raise
    if exit_code:
        raise InstallFailed(log_path.read_text(errors="replace")[-1000:].strip())


def apt_environment() -> dict[str, str]:
    """Return our environment, told to ask nothing."""
    return {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}


@contextlib.contextmanager
def services_forbidden() -> Iterator[None]:
    """Forbid packages to start services while the block runs; an existing policy is left as it is.

    A policy that is ours, left by a run that was killed, is taken over and removed.
    """
    ours = not POLICY.exists() or POLICY.read_text(errors="replace") == POLICY_TEXT
    if ours:
        POLICY.write_text(POLICY_TEXT)
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)


def installed_units() -> set[str]:
    """Return those of `UNITS` that the system knows."""
    return {unit for unit in UNITS if any((folder / unit).exists() for folder in UNIT_FOLDERS)}


def disable_units(units: set[str]) -> None:
    """Undo what packages enable, which no policy forbids, and stop what an existing policy let them start."""
    for unit in sorted(units):
        if shutil.which("systemctl"):
            run_quietly(["systemctl", "disable", unit])
        if Path("/run/systemd/system").exists():
            run_quietly(["systemctl", "stop", unit])
        if Path("/etc/init.d", unit.removesuffix(".service")).exists():
            run_quietly(["update-rc.d", unit.removesuffix(".service"), "disable"])


def end_processes_of(users: tuple[str, ...]) -> None:
    """Kill what the packages' own users run.

    RabbitMQ's maintainer scripts call Erlang, which leaves a daemon (epmd) behind although no service was started.
    """
    uids = set()
    for user in users:
        with contextlib.suppress(KeyError):
            uids.add(pwd.getpwnam(user).pw_uid)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid in uids:
                os.kill(int(folder.name), signal.SIGKILL)


def run_quietly(argv: list[str]) -> None:
    """Run a command whose failure means that there was nothing to do."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)


def main() -> int:
    """Unpack the downloaded packages, uninterrupted; what was there before is not touched."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    before = installed_units()
    with services_forbidden():
        done = subprocess.run([*APT_GET, "install", "--no-install-recommends", *PACKAGES], check=False)
        disable_units(installed_units() - before)
        if not before:
            end_processes_of(SERVICE_USERS)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
