"""Where only Docker is, the servers run through docker compose and are taken down in every case.

The Docker here is a stand-in that runs the host's redis-server, so that the whole way can be walked without a daemon.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from devstack import processes
from devstack.install import Containers
from devstack.redis_server import RedisServer

pytestmark = pytest.mark.integration
LONG_TIMEOUT_S = 10.0

DOCKER = """#!/bin/sh
# called as: docker compose -p PROJECT -f FILE COMMAND [ARG...]
here=$(dirname "$0")
command=$6
echo "$command $DEVSTACK_REDIS_PORT" >>"$here/calls"
case $command in
up) echo $$ >"$here/pid"
    cd "$here"; exec redis-server --port "$DEVSTACK_REDIS_PORT" --bind 127.0.0.1 --save "" $DEVSTACK_REDIS_ARGUMENTS ;;
kill) kill -9 "$(cat "$here/pid")" ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not on PATH")
    path = tmp_path / "docker"
    path.write_text(DOCKER)
    path.chmod(0o755)
    return path


def calls_of(docker: Path) -> list[str]:
    return [line.split()[0] for line in (docker.parent / "calls").read_text().splitlines()]


def test_redis_in_a_container_starts_restarts_and_is_taken_down(docker: Path) -> None:
    with RedisServer(servers=Containers(docker), password="secret") as server:
        with server.client() as client:
            client.set("key", "value")
        server.restart()
        with server.client() as client:
            assert client.get("key") is None
    assert calls_of(docker) == ["up", "kill", "up", "kill", "down"]


def test_containers_are_taken_down_when_their_parent_was_killed(docker: Path) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        "from devstack.install import Containers\n"
        "from devstack.redis_server import RedisServer\n"
        "RedisServer(servers=Containers(pathlib.Path(sys.argv[1]))).start()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(docker)], timeout=LONG_TIMEOUT_S, check=False)
    processes.wait_until(lambda: "down" in calls_of(docker), timeout_s=LONG_TIMEOUT_S, what="compose down")
