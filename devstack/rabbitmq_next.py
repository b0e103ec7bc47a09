"""Make a chroot with the RabbitMQ of Debian's testing release, for tests on a newer broker than the installed one.

    python -m devstack.rabbitmq_next [FOLDER]          (root, Debian; a minute or two; nothing is installed)
    DEVSTACK_RABBITMQ_ROOT=FOLDER/root python -m pytest tests -m integration

Everything that mounts runs in a mount namespace of its own, so this machine never sees a mount below the folder: it can
be removed like any other, at any time.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from devstack import apt_packages, processes
from devstack.install import RABBITMQ_ROOT_VARIABLE, say_on_stderr

DEFAULT_FOLDER = Path(__file__).parent.parent / ".devstack" / "rabbitmq-next"
RELEASE = "forky"
PACKAGES = ("rabbitmq-server",)
DOWNLOAD_TIMEOUT_S = 120.0
BOOTSTRAP_TIMEOUT_S = 900.0
INSTALL_TIMEOUT_S = 900.0
#: seconds between two lines that say how far it is
PROGRESS_EVERY_S = 10.0

# Mounts and daemons end with the command: the packages' scripts start Erlang, which leaves an epmd behind
_PRIVATELY = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_IN_ROOT = 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'


class MakingFailed(Exception):
    """The chroot could not be made; the text ends with what the failing command said. Raised by `make`."""


def make(folder: Path) -> Path:
    """Make the chroot in a folder and return its root; one that is complete already is left as it is.

    Raises:  MakingFailed
    """
    root, half_made = folder / "root", folder / "root.half-made"
    if root.exists():
        return root
    if not apt_packages.usable():
        raise MakingFailed("it takes root on Debian")
    shutil.rmtree(half_made, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    tools = processes.make_folder("debootstrap")
    try:
        debootstrap(half_made, tools=tools)
        # without it a node waits for ever for "localhost"
        (half_made / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
        (half_made / "usr/sbin/policy-rc.d").write_text(apt_packages.POLICY_TEXT)
        (half_made / "usr/sbin/policy-rc.d").chmod(0o755)
        install = (*apt_packages.APT_GET, "install", "--no-install-recommends", *PACKAGES)
        run(
            (*_PRIVATELY, "sh", "-c", _IN_ROOT, str(half_made), *install),
            log_path=tools / "install.log",
            timeout_s=INSTALL_TIMEOUT_S,
            what=f"installing {' '.join(PACKAGES)}",
        )
    finally:
        processes.remove_folder(tools)
    half_made.rename(root)
    return root


def debootstrap(root: Path, *, tools: Path) -> None:
    """Unpack the release's smallest system into a folder, with a debootstrap that is not installed either."""
    log_path = tools / "debootstrap.log"
    fetch = ("apt-get", "-qq", "download", "debootstrap")
    try:
        run(fetch, log_path=log_path, timeout_s=DOWNLOAD_TIMEOUT_S, what="fetching debootstrap", cwd=tools)
    except MakingFailed:  # lists that are missing, or too old to fetch by
        update = (*apt_packages.APT_GET, "update")
        run(update, log_path=log_path, timeout_s=apt_packages.UPDATE_TIMEOUT_S, what="updating apt's lists")
        run(fetch, log_path=log_path, timeout_s=DOWNLOAD_TIMEOUT_S, what="fetching debootstrap", cwd=tools)
    (archive,) = tools.glob("debootstrap_*.deb")
    run(
        ("dpkg-deb", "-x", str(archive), str(tools)),
        log_path=log_path,
        timeout_s=DOWNLOAD_TIMEOUT_S,
        what="unpacking debootstrap",
    )
    scripts = tools / "usr/share/debootstrap"
    script = scripts / "scripts" / RELEASE
    if not script.exists():  # an older debootstrap does not know the name; all releases since are made like sid
        script.symlink_to("sid")
    run(
        (*_PRIVATELY, str(tools / "usr/sbin/debootstrap"), "--variant=minbase", RELEASE, str(root)),
        log_path=log_path,
        timeout_s=BOOTSTRAP_TIMEOUT_S,
        what=f"unpacking Debian {RELEASE}",
        variables={"DEBOOTSTRAP_DIR": str(scripts)},
    )


def run(
    argv: tuple[str, ...],
    *,
    log_path: Path,
    timeout_s: float,
    what: str,
    cwd: Path | None = None,
    variables: dict[str, str] | None = None,
) -> None:
    """Run one command, saying every few seconds how long it has been at it.

    Raises:  MakingFailed
    """
    begun_at = said_at = time.monotonic()
    say_on_stderr(f"devstack: {what} ...")
    env = {**apt_packages.apt_environment(), **(variables or {})}
    child = processes.spawn(argv, env=env, log_path=log_path, cwd=cwd)
    try:
        while child.running:
            now = time.monotonic()
            if now > begun_at + timeout_s:
                raise MakingFailed(f"{what} took over {timeout_s:g} s; it said:\n{child.log()[-1000:].strip()}")
            if now > said_at + PROGRESS_EVERY_S:
                said_at = now
                say_on_stderr(f"devstack: {what}: {now - begun_at:.0f} s")
            time.sleep(0.1)
    finally:
        child.end()
    if child.exit_code:
        raise MakingFailed(f"{what} failed; it said:\n{child.log()[-1000:].strip()}")


def main() -> int:
    """Make the chroot and say how to use it."""
    folder = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else DEFAULT_FOLDER
    with processes.signals_unwind():
        try:
            root = make(folder)
        except MakingFailed as err:
            say_on_stderr(f"devstack: no newer RabbitMQ: {err}")
            return 1
    print(f"{RABBITMQ_ROOT_VARIABLE}={os.path.relpath(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
