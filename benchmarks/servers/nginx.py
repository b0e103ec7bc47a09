"""nginx as an instant model: the one of this machine, or one unpacked from its package into a folder of ours.

Nothing is installed: `apt-get download` and `dpkg -x` change nothing of the system and start no service.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.servers import answers
from devstack import processes
from devstack.processes import LOOPBACK

PROJECT_FOLDER = Path(__file__).parent.parent.parent
#: kept between runs
_CACHE = PROJECT_FOLDER / ".devstack" / "nginx"
#: the package that holds the program: Debian's and older Ubuntus'
_PACKAGES = ("nginx", "nginx-core")
_APT_TIMEOUT_S = 180.0
_START_TIMEOUT_S = 10.0
_CONFIG = """\
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    keepalive_requests 1000000000;
    keepalive_timeout 600s;
    client_max_body_size 64m;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen {address}:{port};
        location /v1/chat/completions {{ default_type application/json; return 200 '{answer}'; }}
        location /metrics {{ default_type text/plain; return 200 '{metrics}'; }}
        location / {{ default_type text/plain; return 200 'ok'; }}
    }}
}}
"""


class NginxMissing(Exception):
    """There is none, and none could be fetched. Raised by `provide_nginx`; the caller takes the stand-in."""


def provide_nginx() -> Path:
    """Return a program that runs.

    Raises:  NginxMissing
    """
    unpacked = _CACHE / "usr" / "sbin" / "nginx"
    for candidate in (shutil.which("nginx"), "/usr/sbin/nginx", str(unpacked)):
        if candidate and runs(Path(candidate)):
            return Path(candidate)
    if shutil.which("apt-get") and shutil.which("dpkg"):
        for update in (False, True):
            for package in _PACKAGES:
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    fetch(package, update=update)
                    if runs(unpacked):
                        return unpacked
    raise NginxMissing("no nginx here, and none could be fetched")


def runs(program: Path) -> bool:
    """Tell whether it starts here: an unpacked one may lack a library."""
    try:
        return subprocess.run([program, "-v"], capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def version(program: Path) -> str:
    """Return what it calls itself."""
    said = subprocess.run([program, "-v"], capture_output=True, text=True, timeout=10, check=False).stderr
    return said.strip().rpartition("/")[2]


def fetch(package: str, *, update: bool) -> None:
    """Download a package and unpack it into the cache.

    Raises:  OSError, subprocess.SubprocessError
    """
    if update and os.geteuid() == 0:
        subprocess.run(["apt-get", "-qq", "update"], capture_output=True, timeout=_APT_TIMEOUT_S, check=True)
    folder = processes.make_folder("nginx-package")
    try:
        subprocess.run(
            ["apt-get", "-qq", "download", package], cwd=folder, capture_output=True, timeout=_APT_TIMEOUT_S, check=True
        )
        _CACHE.mkdir(parents=True, exist_ok=True)
        for archive in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", archive, _CACHE], capture_output=True, timeout=_APT_TIMEOUT_S, check=True)
    finally:
        processes.remove_folder(folder)


def start(program: Path, *, folder: Path) -> tuple[processes.Child, int]:
    """Start a private one; return its process and its port.

    Raises:  NotInTime
    """
    port = processes.free_port()
    config = folder / "nginx.conf"
    config.write_text(
        _CONFIG.format(
            # as root, its worker would become nobody, who may not look into the folder
            user="user root;" if os.geteuid() == 0 else "",
            folder=folder,
            address=LOOPBACK,
            port=port,
            answer=answers.completion(answers.SMALL_ANSWER_BYTES).decode().replace("'", ""),
            metrics=answers.METRICS_PAGE.decode(),
        )
    )
    argv: list[str | Path] = [program, "-p", folder, "-c", config, "-e", folder / "error.log"]
    child = processes.spawn(argv, env={"PATH": os.environ.get("PATH", os.defpath)}, log_path=folder / "nginx.log")
    processes.wait_until(
        lambda: processes.accepts_connections(port) or not child.running,
        timeout_s=_START_TIMEOUT_S,
        what="nginx listens",
    )
    return child, port
