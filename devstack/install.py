"""Find RabbitMQ and Redis on this machine, or get them here.

In order: programs that are installed, on PATH or off it; apt, when we are root on Debian or Ubuntu; containers, when a
Docker daemon answers; else `ServersMissing`, one sentence of what to install. Runs on the thread that starts the stack.

DEVSTACK_RABBITMQ_ROOT names a chroot to take RabbitMQ from instead; `devstack.rabbitmq_next` makes one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from devstack import apt_packages

_RABBITMQ_FOLDERS = (
    # Before PATH: Debian's /usr/sbin/rabbitmq-server changes user, and that user cannot read a private folder
    "/usr/lib/rabbitmq/bin",
    "/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin",
    "/opt/homebrew/opt/rabbitmq/sbin",
    "/usr/local/opt/rabbitmq/sbin",
    "/opt/homebrew/sbin",
    "/usr/local/sbin",
    "/home/linuxbrew/.linuxbrew/opt/rabbitmq/sbin",
)
_ERLANG_FOLDERS = (
    "/usr/bin",
    "/usr/lib/erlang/bin",
    "/opt/homebrew/opt/erlang/lib/erlang/bin",
    "/opt/homebrew/opt/erlang*/lib/erlang/bin",
    "/usr/local/opt/erlang*/lib/erlang/bin",
    "/opt/homebrew/bin",
    "/usr/local/bin",
    "/home/linuxbrew/.linuxbrew/opt/erlang*/lib/erlang/bin",
)
_REDIS_FOLDERS = (
    "/usr/bin",
    "/usr/sbin",
    "/opt/homebrew/opt/redis/bin",
    "/usr/local/opt/redis/bin",
    "/opt/homebrew/bin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/home/linuxbrew/.linuxbrew/opt/redis/bin",
)
#: names the root folder of another system, whose RabbitMQ is to be run instead of the installed one
RABBITMQ_ROOT_VARIABLE = "DEVSTACK_RABBITMQ_ROOT"
#: seconds for `docker info`, which hangs when its daemon does
_DOCKER_ANSWER_TIMEOUT_S = 10.0


class ServersMissing(Exception):
    """RabbitMQ or Redis is not here and cannot be got. Its text is the sentence for the person at the terminal."""


@dataclass(frozen=True)
class Programs:
    """Installed servers, by path."""

    rabbitmq_server: Path
    rabbitmqctl: Path
    erl: Path
    epmd: Path
    redis_server: Path
    #: what the paths of RabbitMQ and Erlang begin at; a node of any other root than / runs in a chroot
    rabbitmq_root: Path = Path("/")


@dataclass(frozen=True)
class Containers:
    """No programs, but a Docker daemon that can run the services of `compose.yaml`."""

    docker: Path


Servers = Programs | Containers


def find_program(name: str, *, folders: Iterable[str], root: Path = Path("/")) -> Path | None:
    """Return the first executable of that name in the folders (globs are fine), then on PATH.

    Below another root than / there is no PATH to ask; the path returned is the one that a process in that chroot sees.
    """
    for pattern in folders:
        for folder in sorted(root.glob(pattern.lstrip("/"))):
            if os.access(folder / name, os.X_OK) and (folder / name).is_file():
                return Path("/") / (folder / name).relative_to(root)
    on_path = shutil.which(name) if root == Path("/") else None
    return Path(on_path) if on_path else None


def find_programs() -> Programs | None:
    """Return the installed servers, or None when one of them is missing.

    Raises:  ServersMissing when DEVSTACK_RABBITMQ_ROOT names a folder without a RabbitMQ
    """
    root = Path(os.environ.get(RABBITMQ_ROOT_VARIABLE) or "/").resolve()
    rabbitmq_server = find_program("rabbitmq-server", folders=_RABBITMQ_FOLDERS, root=root)
    rabbitmqctl = find_program("rabbitmqctl", folders=_RABBITMQ_FOLDERS, root=root)
    erl = find_program("erl", folders=_ERLANG_FOLDERS, root=root)
    epmd = find_program("epmd", folders=_ERLANG_FOLDERS, root=root)
    redis_server = find_program("redis-server", folders=_REDIS_FOLDERS)
    if root != Path("/") and not (rabbitmq_server and rabbitmqctl and erl and epmd):
        # to run another version than the one that was asked for would be a test of the wrong broker
        raise ServersMissing(
            f"{RABBITMQ_ROOT_VARIABLE} is {root}, where no RabbitMQ is: run `python -m devstack.rabbitmq_next`."
        )
    if rabbitmq_server and rabbitmqctl and erl and epmd and redis_server:
        return Programs(rabbitmq_server, rabbitmqctl, erl, epmd, redis_server, rabbitmq_root=root)
    return None


def find_containers() -> Containers | None:
    """Return Docker if it has the compose command and its daemon answers."""
    docker = shutil.which("docker")
    if docker is None:
        return None
    for argv in (["docker", "compose", "version"], ["docker", "info", "--format", "{{.ServerVersion}}"]):
        try:
            answer = subprocess.run(
                argv,
                executable=docker,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_DOCKER_ANSWER_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if answer.returncode:
            return None
    return Containers(Path(docker))


def say_on_stderr(sentence: str) -> None:
    """Print one line for the person at the terminal."""
    print(sentence, file=sys.stderr, flush=True)


def provide_servers(*, say: Callable[[str], None] = say_on_stderr) -> Servers:
    """Return servers that can be started, installing them if need be.

    Raises:  ServersMissing
    """
    programs = find_programs()
    if programs:
        return programs
    failure = ""
    if apt_packages.usable():
        try:
            apt_packages.install(say=say)
        except apt_packages.InstallFailed as err:
            failure = f" (apt was tried: {err})"
        programs = find_programs()
        if programs:
            return programs
    containers = find_containers()
    if containers:
        say("devstack: RabbitMQ and Redis will run as containers of docker compose")
        return containers
    raise ServersMissing(how_to_install() + failure)


def how_to_install() -> str:
    """Say in one sentence what the person has to install."""
    if sys.platform == "darwin":
        return "RabbitMQ and Redis are missing: run `brew install rabbitmq redis`, or start Docker, and try again."
    return (
        "RabbitMQ and Redis are missing: install the packages rabbitmq-server and redis-server "
        "(Debian, Ubuntu: `sudo apt-get install rabbitmq-server redis-server`), or start Docker, and try again."
    )


def main() -> int:
    """Provide the servers and say where they are."""
    try:
        servers = provide_servers()
    except ServersMissing as err:
        say_on_stderr(str(err))
        return 1
    match servers:
        case Programs():
            print(f"RabbitMQ: {servers.rabbitmq_server}, Redis: {servers.redis_server}")
        case Containers():
            print(f"RabbitMQ and Redis: in containers, by {servers.docker}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
