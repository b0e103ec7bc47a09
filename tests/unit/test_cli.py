"""The command line: what it prints, what it exits with, and what it never shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
from fakes_http import HttpServer, answer
from fakes_resp import RespServer
from timeouts import LONG_TIMEOUT_S

from inference_worker import __version__, cli
from inference_worker.__main__ import listen_for_signals, main
from inference_worker.config import VARIABLES
from inference_worker.supervisor import ExitCode

Environment = dict[str, str]
Say = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("restored_logging")


@pytest.fixture(autouse=True)
def _folder_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[Environment], None]:
    def set_(environment: Environment) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return set_


def _run(*argv: str) -> int:
    return cli.run(list(argv), SimpleQueue())


# -- bad configuration ------------------------------------------------------------------------------------------------


def test_r64_bad_configuration_ends_with_78_and_names_every_fault(
    set_environment: Callable[[Environment], None], environment: Environment, capsys: Say
) -> None:
    del environment["USER_ID"], environment["CROESUS_HOST"]
    set_environment({**environment, "RABBITMQ_PORT": "abc", "RABBITMQ_HEARTBEAT_S": "0", "REDIS_URL": "S3cret"})
    assert _run() == ExitCode.BAD_CONFIG == 78
    out, err = capsys.readouterr()
    head, *faults = err.splitlines()
    assert out == ""
    assert "5 faults" in head
    named = [fault.split()[0].rstrip(",") for fault in faults]
    assert named == ["RABBITMQ_PORT", "RABBITMQ_HEARTBEAT_S", "REDIS_URL", "CROESUS_HOST", "USER_ID"]
    assert "'abc'" in err
    assert "S3cret" not in err


@pytest.mark.parametrize("flag", ["--check", "--healthcheck"])
def test_bad_configuration_is_one_for_every_command(flag: str) -> None:
    assert _run(flag) == 78


def test_file_that_cannot_be_read_is_bad_configuration(tmp_path: Path, capsys: Say) -> None:
    (tmp_path / ".env").write_bytes(b"USER_ID=\xff\n")
    assert _run() == 78
    assert ".env" in capsys.readouterr().err


def test_r64_process_itself_ends_with_78(tmp_path: Path) -> None:
    package = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "inference_worker"],
        env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": package},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONG_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 78
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "DEPLOYMENT_ID" in done.stderr


# -- flags ------------------------------------------------------------------------------------------------------------


def test_version_is_printed(capsys: Say) -> None:
    with pytest.raises(SystemExit) as caught:
        _run("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"inference_worker {__version__}\n"


def test_help_tells_every_variable_flag_and_exit_code(capsys: Say) -> None:
    with pytest.raises(SystemExit) as caught:
        _run("--help")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    told = [*(variable.name for variable in VARIABLES), "--check", "--healthcheck", "--version"]
    told += [f"{code.value} " for code in ExitCode]
    assert [word for word in told if word not in out] == []


@pytest.mark.parametrize("argv", [["--nonsense"], ["run"]])
def test_unknown_argument_is_refused(argv: list[str], capsys: Say) -> None:
    with pytest.raises(SystemExit) as caught:
        _run(*argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


# -- --check ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def http_server() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.stop()


@pytest.fixture
def resp_server() -> Iterator[RespServer]:
    server = RespServer()
    yield server
    server.stop()


@pytest.fixture
def neighbours(
    environment: Environment, http_server: HttpServer, resp_server: RespServer, closed_port: int
) -> Environment:
    """Every neighbour but RabbitMQ is there."""
    return {
        **environment,
        "RABBITMQ_HOST": "127.0.0.1",
        "RABBITMQ_PORT": str(closed_port),
        "RABBITMQ_PASSWORD": "S3cretA",
        "REDIS_URL": f"redis://:S3cretB@127.0.0.1:{resp_server.port}",
        "MODEL_CONTAINER_URL": http_server.url,
        "MODEL_API_KEY": "S3cretD",
        "METRIC_SERVER_URL": http_server.url,
        "METRIC_SERVER_SERVICE_TOKEN": "S3cretC",
        "CROESUS_HOST": http_server.url,
    }


def test_check_tries_every_neighbour_and_fails_for_one_that_is_away(
    set_environment: Callable[[Environment], None], neighbours: Environment, http_server: HttpServer, capsys: Say
) -> None:
    set_environment(neighbours)
    http_server.reply(answer(b""))
    http_server.reply(answer(b"", status="404 Not Found"))
    http_server.reply(answer(b"", status="405 Method Not Allowed"))
    assert _run("--check") == 1
    verdicts = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith(("ok", "FAIL"))]
    expected = [["FAIL", "RabbitMQ:"], ["ok", "Redis:"], ["ok", "model:"], ["ok", "MetricServer:"], ["ok", "Croesus:"]]
    assert verdicts == expected
    assert [request.target for request in http_server.requests] == ["/health", "/", "/"]


def test_check_declares_and_writes_nothing(
    set_environment: Callable[[Environment], None],
    neighbours: Environment,
    http_server: HttpServer,
    resp_server: RespServer,
) -> None:
    set_environment(neighbours)
    _run("--check")
    assert {request.method for request in http_server.requests} == {"GET"}
    assert resp_server.sent("PING")
    assert not resp_server.sent("SET")


def test_check_calls_a_model_that_is_not_healthy_a_failure(
    set_environment: Callable[[Environment], None], neighbours: Environment, http_server: HttpServer, capsys: Say
) -> None:
    set_environment(neighbours)
    http_server.reply(answer(b"", status="503 Loading"))
    _run("--check")
    assert "FAIL  model: " in capsys.readouterr().out


def test_check_calls_a_refused_login_a_failure(
    set_environment: Callable[[Environment], None], neighbours: Environment, resp_server: RespServer, capsys: Say
) -> None:
    set_environment(neighbours)
    resp_server.answers |= {"HELLO": b"-WRONGPASS x\r\n", "AUTH": b"-WRONGPASS x\r\n"}
    _run("--check")
    assert "FAIL  Redis: " in capsys.readouterr().out


def test_check_prints_the_effective_configuration(
    set_environment: Callable[[Environment], None], neighbours: Environment, capsys: Say
) -> None:
    set_environment({**neighbours, "RABBITMQ_PREFETCH": " 8 "})
    _run("--check")
    lines = capsys.readouterr().out.splitlines()
    assert "RABBITMQ_PREFETCH=8" in lines
    assert "RABBITMQ_VHOST=/" in lines
    assert {line.partition("=")[0] for line in lines[: len(VARIABLES)]} == {variable.name for variable in VARIABLES}


def test_r80_check_shows_no_secret(
    set_environment: Callable[[Environment], None], neighbours: Environment, capsys: Say
) -> None:
    set_environment({**neighbours, "REDIS_URL": "redis://:S3cretB@bad-host.invalid/"})
    assert _run("--check") == 1
    out, err = capsys.readouterr()
    assert "S3cret" not in out + err
    assert "FAIL  Redis" in out


# -- --healthcheck ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "code"), [("200 OK", 0), ("503 Stuck", 1), ("404 Not Found", 1)])
def test_healthcheck_is_the_workers_own_word(
    set_environment: Callable[[Environment], None],
    environment: Environment,
    http_server: HttpServer,
    status: str,
    code: int,
) -> None:
    port = http_server.url.rpartition(":")[2]
    set_environment({**environment, "WORKER_HTTP_PORT": port})
    http_server.reply(answer(b"", status=status))
    assert _run("--healthcheck") == code
    assert http_server.requests[0].target == "/healthz"


def test_healthcheck_of_a_worker_that_is_not_there_fails(
    set_environment: Callable[[Environment], None], environment: Environment, closed_port: int
) -> None:
    set_environment({**environment, "WORKER_HTTP_PORT": str(closed_port)})
    assert _run("--healthcheck") == 1


def test_healthcheck_where_the_page_is_off_has_nothing_to_complain_of(
    set_environment: Callable[[Environment], None], environment: Environment
) -> None:
    set_environment({**environment, "WORKER_HTTP_PORT": "0"})
    assert _run("--healthcheck") == 0


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers_as_before")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_r61_a_signal_is_put_on_the_queue_and_nothing_else(number: signal.Signals) -> None:
    signals = listen_for_signals()
    signal.raise_signal(number)
    signal.raise_signal(number)
    assert [signals.get(timeout=LONG_TIMEOUT_S) for _ in range(2)] == [number, number]
    assert signals.empty()


def test_r67_off_the_main_thread_there_are_no_handlers_and_no_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main([])))
    thread.start()
    thread.join(LONG_TIMEOUT_S)
    assert codes == [78]
    assert signal.getsignal(signal.SIGTERM) is before
