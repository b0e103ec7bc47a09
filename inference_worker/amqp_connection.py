"""Opening a connection to RabbitMQ: parameters, timeouts, keepalive, and the library's errors in our words.

Runs on the thread that will own the connection. Knows pika, as do its neighbours that use a connection.
"""

from __future__ import annotations

import logging
import random
import socket
import ssl
from contextlib import suppress
from typing import Any

import pika
import pika.exceptions
from pika.adapters.utils.connection_workflow import AMQPConnectorException

from inference_worker import amqp_headers as _repairs_the_codec  # noqa: F401
from inference_worker.config import BrokerConfig
from inference_worker.errors import BrokerError, BrokerUnusable

logger = logging.getLogger(__name__)

#: a call that waits for an alarm to end is given up, and the connection with it (design section 6)
_BLOCKED_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
#: pika reads 4 KiB at a time: a message of 10 MB took 2,500 turns of its machinery, and more CPU than all the rest. As
#: long as the broker's largest frame by default, which is then mostly whole: with half of it, a tenth more CPU
_READ_BYTES = 131_072
#: TCP, then the AMQP handshake
_STACK_TIMEOUT_S = 10.0
#: pika would notice a dead link only after 2 x (heartbeat + 5) s, 250 s by default; the kernel within 30 s: 15 s for
#: its probes, and 15 s more for what is sent just before those are over, which ends the probes and begins the timeout
_TCP_OPTIONS = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 15_000}

#: what pika raises when a link or a channel is gone; an unknown host is a plain OSError, and a peer that accepts and
#: says nothing an exception of pika's that is no AMQPError
LIBRARY_ERRORS = (pika.exceptions.AMQPError, AMQPConnectorException, OSError)


def open_connection(broker: BrokerConfig, *, name: str) -> Any:
    """Connect to one of the hosts and log in.

    Runs on the thread that will use the connection; takes at most 15 s for each host.

    Shapes:  a pika.BlockingConnection
    Raises:  BrokerUnusable (a person must act), BrokerError; with several hosts, what the last one tried said
    """
    # in random order, so that a fleet spreads; one by one, since pika drops a whole list for one unknown name (R14)
    hosts = random.sample(broker.hosts, len(broker.hosts))
    for host in hosts[:-1]:
        try:
            return _open(broker, host, name=name)
        except BrokerError as err:
            extra = {"event": "connect_failed_next_host", "host": host}
            logger.info("trying the next host: %s", err, extra=extra)
    return _open(broker, hosts[-1], name=name)


def _open(broker: BrokerConfig, host: str, *, name: str) -> Any:
    try:
        connection = pika.BlockingConnection(
            pika.ConnectionParameters(
                host=host,
                port=broker.port,
                virtual_host=broker.vhost,
                credentials=pika.PlainCredentials(broker.username, broker.password),
                heartbeat=broker.heartbeat_s,
                blocked_connection_timeout=_BLOCKED_TIMEOUT_S,
                socket_timeout=_CONNECT_TIMEOUT_S,
                stack_timeout=_STACK_TIMEOUT_S,
                connection_attempts=1,
                ssl_options=_tls_options(broker, host) if broker.tls else None,
                tcp_options={option: value for option, value in _TCP_OPTIONS.items() if hasattr(socket, option)},
                client_properties={"connection_name": name, "product": "inference_worker"},
            )
        )
    except (*LIBRARY_ERRORS, ValueError) as err:
        # a ValueError: the peer accepted and reset at once (a balancer without a backend), and pika asks for its name
        raise _translate(err, broker, host) from err
    transport = _transport(connection)
    if hasattr(transport, "_MAX_RECV_BYTES"):
        transport._MAX_RECV_BYTES = _READ_BYTES
    return connection


def _tls_options(broker: BrokerConfig, host: str) -> pika.SSLOptions:
    # made anew for each connection: certificates are renewed while we run
    context = ssl.create_default_context(cafile=broker.ca_file or None)
    if broker.cert_file:
        context.load_cert_chain(broker.cert_file, broker.key_file or None)
    return pika.SSLOptions(context, server_hostname=host)


def shut_down(connection: Any) -> None:
    """Shut the connection's socket down, from any thread: every call that waits on it fails at once.

    pika offers no way to the socket; a contract test holds the private one that is taken here.
    """
    connection_socket = getattr(_transport(connection), "_sock", None)
    if connection_socket is not None:
        with suppress(OSError):
            socket.socket.shutdown(connection_socket, socket.SHUT_RDWR)


def unflushed(channel: Any) -> Any:
    """Return what acks and nacks on this channel without sending each by itself; the next pump sends them together.

    The blocking channel polls and sends once for each ack. At 64 slots that was a third of the listener's time, and
    each send gives the interpreter lock away to the slots. A contract test holds the private attribute.
    """
    return getattr(channel, "_impl", channel)


def send_now(connection: Any) -> None:
    """Send the acks and nacks that wait, as far as the socket takes them; the next pump sends the rest.

    The pump would do it after a look at all its sockets, and another one at what follows: 4 % of a message's CPU. What
    fails here, the pump says. A contract test holds the private names.
    """
    transport = _transport(connection)
    on_writable = getattr(transport, "_on_socket_writable", None)
    if on_writable is not None and transport.get_write_buffer_size():
        on_writable()


def _transport(connection: Any) -> Any:
    return getattr(getattr(connection, "_impl", None), "_transport", None)


def close_connection(connection: Any) -> None:
    """Close politely; the caller bounds the time, since the library waits for the peer."""
    with suppress(*LIBRARY_ERRORS):
        if connection.is_open:
            connection.close()


def describe(err: BaseException) -> str:
    """Name an error of the library in one line; most of its connection errors have an empty text."""
    text = str(err).strip()
    return f"{type(err).__name__}: {text[:300]}" if text else type(err).__name__


def _translate(err: BaseException, broker: BrokerConfig, host: str) -> BrokerError:
    where, cause = f"{host}:{broker.port}", _innermost(err)
    match err:
        case pika.exceptions.ProbableAuthenticationError():
            return BrokerUnusable(f"{where} refuses the login of RABBITMQ_USERNAME {broker.username!r}")
        case pika.exceptions.ProbableAccessDeniedError():
            return BrokerUnusable(f"{where} refuses RABBITMQ_VHOST {broker.vhost!r}: missing, or not allowed to us")
        case socket.gaierror():
            return BrokerUnusable(f"RABBITMQ_HOST {host!r} is an unknown host")
    if isinstance(cause, ssl.SSLError):
        return BrokerUnusable(f"no TLS with {where} ({describe(cause)}); see RABBITMQ_TLS and its files")
    return BrokerError(f"{where} cannot be reached ({describe(cause)})")


def _innermost(err: BaseException) -> BaseException:
    while err.args and isinstance(err.args[0], BaseException):
        err = err.args[0]
    return err
