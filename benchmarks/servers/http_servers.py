"""The servers of a run as objects: an instant model (nginx or the stand-in), a slow one, MetricServer."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from types import TracebackType

from benchmarks.servers import answers, nginx
from devstack import processes
from devstack.processes import LOOPBACK

PROJECT_FOLDER = Path(__file__).parent.parent.parent
_START_TIMEOUT_S = 15.0
CHAT_PATH = "/v1/chat/completions"


class HttpServerProcess:
    """A server in a process and a folder of its own. One thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = processes.make_folder(f"bench-{name}")
        self.port = 0
        self._child: processes.Child | None = None

    def __enter__(self) -> HttpServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def chat_url(self) -> str:
        """The whole URL that a contender posts to."""
        return self.url + CHAT_PATH

    @property
    def pid(self) -> int:
        """The process that leads its tree."""
        assert self._child is not None
        return self._child.pid

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.end(grace_s=0)
            self._child = None
        processes.remove_folder(self.folder)

    def timings(self) -> list[float]:
        """Return what each request took at the stand-in since the last look, seconds; nginx has none."""
        with urllib.request.urlopen(f"{self.url}/timings", timeout=5.0) as answer:
            return [float(value) for value in json.loads(answer.read())]


class StandIn(HttpServerProcess):
    """The asyncio server as a model."""

    def __init__(
        self, *, delay_s: float = 0.0, answer_bytes: int = answers.SMALL_ANSWER_BYTES, is_metric_server: bool = False
    ) -> None:
        super().__init__("metric-server" if is_metric_server else "stand-in")
        self.port = processes.free_port()
        argv = [sys.executable, "-m", "benchmarks.servers.instant_http", "--port", str(self.port)]
        argv += ["--delay-ms", str(delay_s * 1000), "--answer-bytes", str(answer_bytes)]
        if is_metric_server:
            argv += ["--records", str(self.records_path)]
        env = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(PROJECT_FOLDER)}
        self._child = processes.spawn(argv, env=env, log_path=self.folder / "server.log")
        processes.wait_until(
            lambda: processes.accepts_connections(self.port), timeout_s=_START_TIMEOUT_S, what="the stand-in listens"
        )

    @property
    def records_path(self) -> Path:
        """Where it keeps the metrics documents, one a line."""
        return self.folder / "metrics.jsonl"


class MetricServer(StandIn):
    """MetricServer: it takes everything, and keeps the documents."""

    def __init__(self) -> None:
        super().__init__(is_metric_server=True)

    def documents(self) -> list[dict[str, object]]:
        """Return the metrics documents that arrived, and forget them."""
        if not self.records_path.exists():
            return []
        lines = self.records_path.read_bytes().splitlines()
        self.records_path.unlink()
        return [json.loads(line) for line in lines]


class Nginx(HttpServerProcess):
    """nginx as the instant model."""

    def __init__(self, program: Path) -> None:
        super().__init__("nginx")
        self.version = nginx.version(program)
        self._child, self.port = nginx.start(program, folder=self.folder)


def start_instant_model() -> tuple[HttpServerProcess, str]:
    """Start nginx, or the stand-in where there is none; return it and what it is."""
    try:
        model = Nginx(nginx.provide_nginx())
    except (nginx.NginxMissing, processes.NotInTime):
        return StandIn(), "the asyncio stand-in (no nginx)"
    return model, f"nginx {model.version}"
