"""Ways to a Redis that are less than plain: over TLS, as a user with few rights, and behind a name that moves on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from devstack import processes
from devstack.install import Programs, Servers
from devstack.proxy import TcpProxy
from devstack.redis_server import RedisServer

from .support import (
    Deployment,
    completed_text,
    hold_names,
    readyz,
    records,
    said,
    settlements,
    until,
    wait_record,
)

pytestmark = pytest.mark.integration

PROMPT = "Can you be reached this way?"
TLS = Path(__file__).parent.parent / "tls"
CA, CERTIFICATE, KEY = TLS / "rabbitmq-ca.pem", TLS / "rabbitmq-peer.pem", TLS / "rabbitmq-peer-key.pem"
#: every character that means something in a URL
ODD_PASSWORD = "p@ss:w/o#r?d%41 +&=[x]"
KEY_PATTERN = "~infer_*"
#: what may be done besides; neither SELECT nor a look at the server
COMMANDS = ("+@read", "+@write", "+@transaction", "+@connection", "-@dangerous", "-@admin")


@pytest.fixture(scope="module")
def programs(servers: Servers) -> Programs:
    if not isinstance(servers, Programs):
        pytest.skip("the ports of a container are published one by one")
    return servers


@pytest.fixture
def tls_port() -> int:
    return processes.free_port()


@pytest.fixture
def redis_server(programs: Programs, tls_port: int) -> Iterator[RedisServer]:
    """A Redis of its own, which also speaks TLS."""
    files = ("--tls-cert-file", CERTIFICATE, "--tls-key-file", KEY, "--tls-ca-cert-file", CA)
    arguments = ("--tls-port", tls_port, *files, "--tls-auth-clients", "no", "--repl-diskless-sync-delay", 0)
    with RedisServer(servers=programs, arguments=tuple(map(str, arguments))) as server:
        yield server


@pytest.fixture
def replica(programs: Programs, redis_server: RedisServer) -> Iterator[RedisServer]:
    """A second Redis that follows the first one, and has caught up."""
    with RedisServer(servers=programs, arguments=("--replicaof", f"127.0.0.1 {redis_server.port}")) as server:
        until(lambda: replication(server)["master_link_status"] == "up", "the replica follows")
        yield server


def replication(server: RedisServer) -> dict[str, object]:
    with server.client() as client:
        return dict(client.info("replication"))


def command(server: RedisServer, *words: str) -> None:
    with server.client() as client:
        client.execute_command(*words)


def serve_one(deployment: Deployment, prompt: str) -> None:
    assert completed_text(deployment.wait_result(deployment.publish(deployment.request(prompt)))) == said(prompt)


def test_results_are_stored_over_tls(deployment: Deployment, tls_port: int) -> None:
    worker = deployment.start_worker(REDIS_URL=f"rediss://127.0.0.1:{tls_port}", SSL_CERT_FILE=CA)
    serve_one(deployment, PROMPT)
    deployment.stop_empty(worker)
    assert records(worker, "hold_raised", level="WARNING") == []


def test_a_redis_whose_certificate_nobody_vouches_for_gets_no_result(deployment: Deployment, tls_port: int) -> None:
    deployment.declare_queue()
    request_id = deployment.publish(deployment.request(PROMPT))
    worker = deployment.start_worker(ready=False, REDIS_URL=f"rediss://127.0.0.1:{tls_port}")
    wait_record(worker, "hold_raised", hold="result_store_down", level="WARNING")
    # three more probes, by which it would have been taken
    probes = len(deployment.metric_server.documents)
    deployment.metric_server.wait_until(
        lambda: len(deployment.metric_server.documents) >= probes + 3, what="three more flushes"
    )
    assert hold_names(worker) == {"result_store_down"}
    assert not readyz(worker)["ready"]
    assert deployment.result_bytes(request_id) is None
    assert worker.stop() == 0
    assert deployment.calls(PROMPT) == 0
    assert deployment.queue_depth() == 1


@pytest.mark.parametrize("how", ["in the URL", "apart"])
def test_a_user_with_rights_for_its_own_keys_alone_is_enough(
    deployment: Deployment, redis_server: RedisServer, how: str
) -> None:
    command(redis_server, "ACL", "SETUSER", "infer", "on", f">{ODD_PASSWORD}", KEY_PATTERN, "resetchannels", *COMMANDS)
    command(redis_server, "ACL", "SETUSER", "default", "on", "nopass", "~*", "+@all")
    host = f"127.0.0.1:{redis_server.port}"
    settings: dict[str, object] = {"REDIS_URL": f"redis://infer:{quote(ODD_PASSWORD, safe='')}@{host}"}
    if how == "apart":
        settings = {"REDIS_URL": f"redis://infer@{host}", "REDIS_PASSWORD": ODD_PASSWORD}
    # a probe writes, a redelivery reads, a stream and a cancellation have keys of their own
    deployment.declare_queue()
    request_id = deployment.publish(deployment.request(PROMPT))
    deployment.hand_out_once()
    streamed = deployment.request(f"{PROMPT} Slowly, please.")
    streamed["payload"]["stream"] = True
    deployment.publish(streamed)
    worker = deployment.start_worker(LOG_LEVEL="DEBUG", **settings)
    assert completed_text(deployment.wait_result(request_id)) == said(PROMPT)
    assert completed_text(deployment.wait_result(streamed["request_id"])) == said(f"{PROMPT} Slowly, please.")
    deployment.serve_next()
    deployment.stop_empty(worker)
    assert records(worker, "hold_raised", level="WARNING") == []
    assert records(worker, "store_login_refused") == []
    with redis_server.client() as client:
        assert client.acl_log() == []
    assert ODD_PASSWORD not in worker.log()
    assert quote(ODD_PASSWORD, safe="") not in worker.log()


def test_r32_a_failover_behind_the_same_name_needs_no_restart_and_no_second_call(
    deployment: Deployment, redis_server: RedisServer, replica: RedisServer, redis_proxy: TcpProxy
) -> None:
    """The worker's kept connections lead to the old master, which refuses every write; new ones lead to the new one."""
    worker = deployment.start_worker(REDIS_URL=f"redis://127.0.0.1:{redis_proxy.port}", RABBITMQ_PREFETCH=2)
    serve_one(deployment, PROMPT)
    deployment.model.behave(delay_s=1.0)
    prompts = [f"{PROMPT} {number}" for number in range(6)]
    request_ids = [deployment.publish(deployment.request(prompt)) for prompt in prompts]
    deployment.model.ledger.wait_for_calls(prompts[0])
    # the promotion, in the order in which an operator's tool makes it; the name follows last
    command(replica, "REPLICAOF", "NO", "ONE")
    command(redis_server, "REPLICAOF", "127.0.0.1", str(replica.port))
    wait_record(worker, "hold_raised", hold="result_store_down")
    redis_proxy.target_port = replica.port
    with replica.client() as client:
        until(
            lambda: all(client.exists(f"infer_resp:{request_id}") for request_id in request_ids),
            "every result is in the new master",
        )
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        # read from the old one, which follows by now
        assert completed_text(deployment.wait_result(request_id)) == said(prompt)
        assert deployment.calls(prompt) == 1
        assert sum(what == "requeue" for what, _ in settlements(worker, request_id)) <= 1
    deployment.serve_next()
    deployment.stop_empty(worker)
    assert deployment.dead_letters() == []
