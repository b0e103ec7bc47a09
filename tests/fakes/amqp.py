"""A RabbitMQ in memory, and the part of pika's BlockingConnection and BlockingChannel that the worker uses.

It keeps the real thing's rules: a tag is settled once and dies with its channel, a refused declaration closes its
channel, a dead letter without an exchange is gone. It is silent where pika is silent, and raises pika's own exceptions.
Every connection has a real socket pair: a link that is cut, or shut down from another thread, is the end of that
stream. `tests/contract/test_amqp_contract.py` asks a real RabbitMQ for all that is claimed here.

Not here: heartbeats, TLS, transactions, global QoS, topic and header exchanges.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pika
import pika.frame
from pika import exceptions, spec

from tests.timeouts import LONG_TIMEOUT_S as LONG_S

_LOGIN = "guest"


@dataclass(slots=True, eq=False)
class Message:
    """What lies in a queue. Properties are what pika makes of the bytes on the wire."""

    body: bytes
    properties: pika.BasicProperties
    exchange: str
    routing_key: str
    redelivered: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One call on a connection or a channel of it, and the thread that made it."""

    thread: str
    #: as given to `FakeBroker.connect`
    purpose: str
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False)
class _Consumer:
    tag: str
    queue: _Queue
    channel: _BrokerChannel
    #: per consumer, as the broker counts (basic.qos, global false); 0 = no limit
    prefetch: int
    unacked_count: int = 0

    @property
    def has_room(self) -> bool:
        return not self.prefetch or self.unacked_count < self.prefetch


@dataclass(slots=True, eq=False)
class _Queue:
    name: str
    durable: bool
    arguments: dict[str, Any]
    messages: deque[Message] = field(default_factory=deque)
    consumers: deque[_Consumer] = field(default_factory=deque)

    @property
    def is_full(self) -> bool:
        limit = self.arguments.get("x-max-length")
        return (
            limit is not None
            and self.arguments.get("x-overflow") == "reject-publish"
            and len(self.messages) >= int(limit)
        )


@dataclass(slots=True, eq=False)
class _Exchange:
    kind: str
    durable: bool
    bindings: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Unacked:
    queue: _Queue
    message: Message
    consumer: _Consumer | None


class _ChannelError(Exception):
    """The broker closes the channel with this code. Never leaves this file."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


class _BrokerChannel:
    """The broker's side of a channel: tags, what is unacked, consumers. Guarded by the broker's lock."""

    def __init__(self, connection: FakeConnection, channel: FakeChannel) -> None:
        self.connection, self.channel = connection, channel
        self.last_tag = 0
        self.prefetch = 0
        self.unacked: dict[int, _Unacked] = {}
        self.consumers: dict[str, _Consumer] = {}
        self.is_open = True


class FakeBroker:
    """Queues, exchanges and connections, and the ways to make them misbehave. Safe from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._queues: dict[str, _Queue] = {}
        self._exchanges: dict[str, _Exchange] = {}
        self._tags = itertools.count(1)
        self.connections: list[FakeConnection] = []
        #: every call of a client, in order
        self.calls: list[Call] = []
        #: raised by the next connects, one each
        self.connect_errors: deque[Exception] = deque()
        #: called with each message that is acked, at that moment
        self.on_ack: Callable[[Message], None] = lambda _: None
        #: a user without configure right
        self.may_configure = True
        self.max_message_bytes = 16 * 2**20
        #: answered with basic.nack, whatever the queue says
        self._confirms_to_refuse = 0
        self._links_to_drop_at_publish = 0

    # -- what a test may look at --------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], Any], *, what: str, timeout_s: float = LONG_S) -> None:
        """Wait until the condition holds; it is looked at after every change in the broker."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), f"not within {timeout_s:g} s: {what}"

    def has_queue(self, name: str) -> bool:
        return name in self._queues

    def has_exchange(self, name: str) -> bool:
        return name in self._exchanges

    def ready(self, queue: str) -> list[Message]:
        """List the messages that wait in a queue."""
        with self._changed:
            return list(self._queues[queue].messages)

    def unacked(self, queue: str) -> list[Message]:
        """List the messages that were delivered and not settled."""
        with self._changed:
            channels = [channel for connection in self.connections for channel in connection.broker_channels]
            return [
                unacked.message
                for channel in channels
                for unacked in channel.unacked.values()
                if unacked.queue.name == queue
            ]

    def consumer_count(self, queue: str) -> int:
        return len(self._queues[queue].consumers)

    def methods(self, *names: str, purpose: str | None = None) -> list[Call]:
        """List the calls of these methods, in order."""
        with self._changed:
            return [
                call for call in self.calls if call.method in names and (purpose is None or call.purpose == purpose)
            ]

    # -- what a test may do -------------------------------------------------------------------------------------------

    def connect(self, purpose: str = "test") -> FakeConnection:
        """Open a connection, or raise what was put into `connect_errors`."""
        with self._changed:
            self.calls.append(Call(threading.current_thread().name, purpose, "connect"))
            self._changed.notify_all()
            if self.connect_errors:
                raise self.connect_errors.popleft()
            connection = FakeConnection(self, purpose)
            self.connections.append(connection)
            return connection

    def publish(
        self, queue: str, body: bytes, properties: pika.BasicProperties | None = None, *, redelivered: bool = False
    ) -> None:
        """Put a message into a queue, as a producer would."""
        with self._changed:
            message = Message(body, _over_the_wire(properties or pika.BasicProperties()), "", queue, redelivered)
            self._queues[queue].messages.append(message)
            self._feed()

    def make_queue(self, name: str, *, durable: bool = True, arguments: dict[str, Any] | None = None) -> None:
        with self._changed:
            self._queues[name] = _Queue(name, durable, dict(arguments or {}))

    def make_exchange(self, name: str, kind: str = "direct", *, durable: bool = True) -> None:
        with self._changed:
            self._exchanges[name] = _Exchange(kind, durable)

    def delete_queue(self, name: str) -> None:
        """Delete a queue; its consumers get a cancel, about which pika says nothing."""
        with self._changed:
            queue = self._queues.pop(name, None)
            for consumer in list(queue.consumers) if queue else ():
                self._cancel(consumer)
            for exchange in self._exchanges.values():
                exchange.bindings = [binding for binding in exchange.bindings if binding[1] != name]
            self._changed.notify_all()

    def delete_exchange(self, name: str) -> None:
        with self._changed:
            self._exchanges.pop(name, None)

    def drop_link(self, connection: FakeConnection) -> None:
        """Cut the connection: what is unacked goes back at once, the client notices at its next call."""
        with self._changed:
            connection._broker_socket.shutdown(socket.SHUT_RDWR)
            self._forget_connection(connection)

    def stall(self, connection: FakeConnection) -> None:
        """Let the peer fall silent: whatever needs an answer waits, until the socket is shut down."""
        with self._changed:
            connection.is_stalled = True

    def close_channel(self, channel: FakeChannel, code: int, text: str) -> None:
        """Close one channel, as after an ack timeout; pika says nothing."""
        with self._changed:
            self._close_channel(channel._broker_side, code, text)

    def cancel_consumers(self, queue: str) -> None:
        """Cancel every consumer of a queue, as when its leader moves; pika says nothing."""
        with self._changed:
            for consumer in list(self._queues[queue].consumers):
                self._cancel(consumer)
            self._changed.notify_all()

    def refuse_confirms(self, count: int) -> None:
        """Answer the next publishes with a nack."""
        self._confirms_to_refuse = count

    def drop_links_after_publish(self, count: int) -> None:
        """Take the next publishes and cut their links before the confirm."""
        self._links_to_drop_at_publish = count

    def close(self) -> None:
        """Close every socket."""
        with self._changed:
            for connection in self.connections:
                connection._release()

    # -- the broker's work, under its lock ----------------------------------------------------------------------------

    def _feed(self) -> None:
        """Deliver what can be delivered, to consumers in turn."""
        for queue in self._queues.values():
            while queue.messages:
                consumer = next((each for each in queue.consumers if each.has_room), None)
                if consumer is None:
                    break
                queue.consumers.remove(consumer)
                queue.consumers.append(consumer)
                self._deliver(queue, consumer)
        self._changed.notify_all()

    def _deliver(self, queue: _Queue, consumer: _Consumer) -> None:
        message, channel = queue.messages.popleft(), consumer.channel
        channel.last_tag += 1
        channel.unacked[channel.last_tag] = _Unacked(queue, message, consumer)
        consumer.unacked_count += 1
        method = spec.Basic.Deliver(
            consumer.tag, channel.last_tag, message.redelivered, message.exchange, message.routing_key
        )
        client = channel.channel
        channel.connection._receive(lambda: client._on_deliver(method, message))

    def _settle(self, channel: _BrokerChannel, tag: int, *, requeue: bool, dead_letter: bool) -> None:
        unacked = channel.unacked.pop(tag, None)
        if unacked is None:
            raise _ChannelError(406, f"PRECONDITION_FAILED - unknown delivery tag {tag}")
        if unacked.consumer is not None:
            unacked.consumer.unacked_count -= 1
        if requeue:
            self._put_back(unacked)
        elif dead_letter:
            self._dead_letter(unacked)
        else:
            self.on_ack(unacked.message)
        self._feed()

    def _put_back(self, unacked: _Unacked) -> None:
        unacked.message.redelivered = True
        if self._queues.get(unacked.queue.name) is unacked.queue:
            unacked.queue.messages.appendleft(unacked.message)

    def _dead_letter(self, unacked: _Unacked) -> None:
        queue, message = unacked.queue, unacked.message
        exchange = queue.arguments.get("x-dead-letter-exchange")
        if exchange is None:
            return
        key = queue.arguments.get("x-dead-letter-routing-key", message.routing_key)
        death = {
            "count": 1,
            "reason": "rejected",
            "queue": queue.name,
            "time": datetime.now(UTC).replace(microsecond=0),
            "exchange": message.exchange,
            "routing-keys": [message.routing_key],
        }
        headers = {
            **(message.properties.headers or {}),
            "x-death": [death],
            "x-first-death-exchange": message.exchange,
            "x-first-death-queue": queue.name,
            "x-first-death-reason": "rejected",
        }
        properties = _over_the_wire(message.properties)
        properties.headers = headers
        # no exchange, no queue: gone, and nobody is told
        self._route(Message(message.body, properties, exchange, key))

    def _route(self, message: Message) -> str:
        """Put a copy into every queue that it is bound for: "ack", "nack" (one is full) or "unroutable"."""
        if message.exchange == "":
            names = [message.routing_key] if message.routing_key in self._queues else []
        else:
            exchange = self._exchanges.get(message.exchange)
            bindings = exchange.bindings if exchange else []
            names = [
                queue
                for key, queue in bindings
                if (exchange and exchange.kind == "fanout") or key == message.routing_key
            ]
        verdict = "unroutable"
        for queue in (self._queues[name] for name in dict.fromkeys(names)):
            if queue.is_full:
                verdict = "nack"
                continue
            queue.messages.append(Message(message.body, message.properties, message.exchange, message.routing_key))
            verdict = "ack" if verdict == "unroutable" else verdict
        return verdict

    def _close_channel(self, channel: _BrokerChannel, code: int, text: str) -> None:
        self._forget_channel(channel)
        client = channel.channel
        channel.connection._receive(lambda: client._on_closed(exceptions.ChannelClosedByBroker(code, text)))

    def _forget_channel(self, channel: _BrokerChannel) -> None:
        channel.is_open = False
        for consumer in channel.consumers.values():
            with contextlib.suppress(ValueError):
                consumer.queue.consumers.remove(consumer)
        channel.consumers.clear()
        # the highest tag first, so that the old order is kept
        for tag in sorted(channel.unacked, reverse=True):
            self._put_back(channel.unacked.pop(tag))
        self._feed()

    def _forget_connection(self, connection: FakeConnection) -> None:
        for channel in connection.broker_channels:
            if channel.is_open:
                self._forget_channel(channel)
        self._changed.notify_all()

    def _cancel(self, consumer: _Consumer) -> None:
        with contextlib.suppress(ValueError):
            consumer.queue.consumers.remove(consumer)
        consumer.channel.consumers.pop(consumer.tag, None)
        client = consumer.channel.channel
        consumer.channel.connection._receive(lambda: client._on_cancel(consumer.tag))

    def _existing_queue(self, name: str) -> _Queue:
        if name not in self._queues:
            raise _ChannelError(404, f"NOT_FOUND - no queue '{name}' in vhost '/'")
        return self._queues[name]

    def _declare_queue(self, name: str, *, passive: bool, durable: bool, arguments: dict[str, Any]) -> _Queue:
        if passive:
            return self._existing_queue(name)
        if not self.may_configure:
            text = f"ACCESS_REFUSED - configure access to queue '{name}' in vhost '/' refused for user '{_LOGIN}'"
            raise _ChannelError(403, text)
        queue = self._queues.setdefault(name, _Queue(name, durable, dict(arguments)))
        differing = _compared(arguments, queue.arguments)
        if queue.durable != durable:
            differing.insert(0, "durable")
        if differing:
            text = f"PRECONDITION_FAILED - inequivalent arg '{differing[0]}' for queue '{name}' in vhost '/'"
            raise _ChannelError(406, text)
        return queue

    def _declare_exchange(self, name: str, kind: str, *, passive: bool, durable: bool) -> None:
        exchange = self._exchanges.get(name)
        if passive:
            if exchange is None:
                raise _ChannelError(404, f"NOT_FOUND - no exchange '{name}' in vhost '/'")
            return
        if not self.may_configure:
            text = f"ACCESS_REFUSED - configure access to exchange '{name}' in vhost '/' refused for user '{_LOGIN}'"
            raise _ChannelError(403, text)
        if exchange is None:
            self._exchanges[name] = _Exchange(kind, durable)
        elif exchange.kind != kind or exchange.durable != durable:
            arg = "type" if exchange.kind != kind else "durable"
            raise _ChannelError(
                406, f"PRECONDITION_FAILED - inequivalent arg '{arg}' for exchange '{name}' in vhost '/'"
            )

    def _bind(self, queue: str, exchange: str, key: str) -> None:
        self._existing_queue(queue)
        if exchange not in self._exchanges:
            raise _ChannelError(404, f"NOT_FOUND - no exchange '{exchange}' in vhost '/'")
        bindings = self._exchanges[exchange].bindings
        if (key, queue) not in bindings:
            bindings.append((key, queue))

    def _take_publish(self, message: Message) -> str:
        """Take a message from a client: "ack", "nack" or "unroutable"."""
        properties = message.properties
        if message.exchange and message.exchange not in self._exchanges:
            raise _ChannelError(404, f"NOT_FOUND - no exchange '{message.exchange}' in vhost '/'")
        if len(message.body) > self.max_message_bytes:
            size, limit = len(message.body), self.max_message_bytes
            text = f"PRECONDITION_FAILED - message size {size} is larger than configured max size {limit}"
            raise _ChannelError(406, text)
        if properties.user_id not in (None, _LOGIN):
            raise _ChannelError(406, f"PRECONDITION_FAILED - user_id property set to '{properties.user_id}'")
        if properties.expiration is not None and not properties.expiration.isdigit():
            raise _ChannelError(406, f"PRECONDITION_FAILED - invalid expiration '{properties.expiration}'")
        if self._confirms_to_refuse:
            self._confirms_to_refuse -= 1
            return "nack"
        verdict = self._route(message)
        self._feed()
        return verdict


class FakeConnection:
    """pika.BlockingConnection. Owned by one thread, as the real one; `add_callback_threadsafe` from any."""

    def __init__(self, broker: FakeBroker, purpose: str) -> None:
        self._broker = broker
        self.purpose = purpose
        self._socket, self._broker_socket = socket.socketpair()
        self._broker_socket.setblocking(False)
        # where pika keeps its socket: `amqp_connection.shut_down` looks there
        self._impl = SimpleNamespace(_transport=SimpleNamespace(_sock=self._socket))
        self.is_open = True
        self.is_stalled = False
        self.channels: list[FakeChannel] = []
        self.broker_channels: list[_BrokerChannel] = []
        #: what the broker has sent and nobody has read yet
        self._inbox: deque[Callable[[], None]] = deque()
        self._callbacks: deque[Callable[[], None]] = deque()
        self._is_dispatch_asked = False

    @property
    def is_closed(self) -> bool:
        return not self.is_open

    def channel(self) -> FakeChannel:
        self._note("channel")
        self._exchange_frames()
        with self._broker._changed:
            channel = FakeChannel(self, len(self.channels) + 1)
            self.channels.append(channel)
            self.broker_channels.append(channel._broker_side)
            return channel

    def add_callback_threadsafe(self, callback: Callable[[], None]) -> None:
        """Accepted before the link is known to be lost, it is never run: as in pika."""
        with self._broker._changed:
            if not self.is_open:
                raise exceptions.ConnectionWrongStateError("add_callback_threadsafe() called on closed connection")
            self._callbacks.append(callback)
            self._wake()

    def process_data_events(self, time_limit: float | None = 0) -> None:
        """Read what has come, wait for at most `time_limit` if there is nothing, then call callbacks and consumers."""
        self._note("process_data_events")
        if not self.is_open:
            # pika's timer is closed with the connection, and says so in its own way
            raise ValueError("Timeout closed before call")
        ends_at = monotonic() + (LONG_S if time_limit is None else time_limit)
        self._read()
        while not (self._is_dispatch_asked or self._callbacks):
            left_s = ends_at - monotonic()
            if left_s <= 0:
                break
            select.select([self._socket], [], [], left_s)
            self._read()
        self._is_dispatch_asked = False
        while self._callbacks:
            self._callbacks.popleft()()
        for channel in list(self.channels):
            channel._dispatch()

    def close(self) -> None:
        self._note("close")
        if not self.is_open:
            raise exceptions.ConnectionWrongStateError("close() called on closed connection")
        self._exchange_frames()
        with self._broker._changed:
            self._end()
            self._broker._forget_connection(self)

    # -- the wire -----------------------------------------------------------------------------------------------------

    def _note(self, method: str, *arguments: Any) -> None:
        with self._broker._changed:
            self._broker.calls.append(Call(threading.current_thread().name, self.purpose, method, arguments))
            self._broker._changed.notify_all()

    def _receive(self, frame: Callable[[], None]) -> None:
        """Take one frame from the broker."""
        with self._broker._changed:
            self._inbox.append(frame)
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._broker_socket.send(b".")

    def _read(self) -> None:
        """Read all that is there.

        Raises:  StreamLostError, when the stream has ended
        """
        if not self.is_open:
            raise exceptions.ConnectionWrongStateError
        while select.select([self._socket], [], [], 0)[0]:
            try:
                ended = not self._socket.recv(65_536)
            except OSError:
                ended = True
            if ended:
                with self._broker._changed:
                    self._end()
                    self._broker._forget_connection(self)
                raise exceptions.StreamLostError("Stream connection lost: the fake's link was cut")
        with self._broker._changed:
            while self._inbox and not self.is_stalled:
                self._inbox.popleft()()

    def _exchange_frames(self) -> None:
        """Ask the broker for something and wait for the answer; a stalled peer gives none until the link ends."""
        self._read()
        while self.is_stalled:
            readable, _, _ = select.select([self._socket], [], [], LONG_S)
            assert readable, "nobody shut the stalled link down"
            self._read()

    def _end(self) -> None:
        self.is_open = False
        for channel in self.channels:
            channel.is_open = False
            channel._consumers.clear()
            channel._pending.clear()

    def _release(self) -> None:
        self.is_open = False
        self._socket.close()
        self._broker_socket.close()


class FakeChannel:
    """pika.adapters.blocking_connection.BlockingChannel. Owned by the thread of its connection."""

    def __init__(self, connection: FakeConnection, number: int) -> None:
        self._connection = connection
        self._broker = connection._broker
        self.channel_number = number
        self.is_open = True
        self._broker_side = _BrokerChannel(connection, self)
        self._consumers: dict[str, Callable[..., None]] = {}
        self._cancelling: set[str] = set()
        self._pending: deque[tuple[str, Callable[[], None], int | None]] = deque()
        self._is_dispatch_asked = False
        self._closing_reason: Exception | None = None
        self._confirms = False

    @property
    def is_closed(self) -> bool:
        return not self.is_open

    @property
    def consumer_tags(self) -> list[str]:
        return list(self._consumers)

    # -- consuming ----------------------------------------------------------------------------------------------------

    def basic_qos(self, prefetch_count: int = 0) -> None:
        with self._request("basic_qos", prefetch_count):
            self._broker_side.prefetch = prefetch_count

    def basic_consume(self, queue: str, on_message_callback: Callable[..., None], auto_ack: bool = False) -> str:
        assert not auto_ack, "the worker acks itself"
        with self._request("basic_consume", queue):
            tag = f"ctag{self.channel_number}.{next(self._broker._tags)}"
            consumer = _Consumer(
                tag, self._broker._existing_queue(queue), self._broker_side, self._broker_side.prefetch
            )
            self._broker_side.consumers[tag] = consumer
            consumer.queue.consumers.append(consumer)
            self._consumers[tag] = on_message_callback
            self._broker._feed()
        return tag

    def basic_cancel(self, consumer_tag: str) -> list[Any]:
        """Stop one consumer; what was not dispatched goes back with requeue."""
        if consumer_tag not in self._consumers:
            self._connection._note("basic_cancel", consumer_tag)
            return []
        with self._request("basic_cancel", consumer_tag):
            self._cancelling.add(consumer_tag)
            consumer = self._broker_side.consumers.pop(consumer_tag, None)
            if consumer is not None:
                with contextlib.suppress(ValueError):
                    consumer.queue.consumers.remove(consumer)
            # dispatched to nobody: what was read before, and what the broker had sent when it read the cancel
            self._reject_pending(consumer_tag)
            self._connection._read()
            self._consumers.pop(consumer_tag, None)
            self._connection._is_dispatch_asked = True
            self._broker._changed.notify_all()
        return []

    def basic_get(self, queue: str, auto_ack: bool = False) -> tuple[Any, Any, Any]:
        with self._request("basic_get", queue):
            messages = self._broker._existing_queue(queue).messages
            if not messages:
                return None, None, None
            message = messages.popleft()
            side = self._broker_side
            side.last_tag += 1
            if not auto_ack:
                side.unacked[side.last_tag] = _Unacked(self._broker._queues[queue], message, None)
            method = spec.Basic.GetOk(side.last_tag, message.redelivered, message.exchange, message.routing_key)
            return method, message.properties, message.body

    # -- settling: nothing comes back, a mistake is told by a closed channel, silently --------------------------------

    def basic_ack(self, delivery_tag: int = 0, multiple: bool = False) -> None:
        self._send_settlement("basic_ack", delivery_tag, multiple=multiple, requeue=False, dead_letter=False)

    def basic_nack(self, delivery_tag: int = 0, multiple: bool = False, requeue: bool = True) -> None:
        self._send_settlement("basic_nack", delivery_tag, multiple=multiple, requeue=requeue, dead_letter=not requeue)

    def basic_reject(self, delivery_tag: int = 0, requeue: bool = True) -> None:
        self._send_settlement("basic_reject", delivery_tag, multiple=False, requeue=requeue, dead_letter=not requeue)

    def _send_settlement(self, method: str, tag: int, *, multiple: bool, requeue: bool, dead_letter: bool) -> None:
        self._connection._note(method, tag, requeue)
        assert not multiple, "the worker never settles several at once"
        self._raise_if_not_open()
        with self._broker._changed:
            if self._connection.is_stalled or not self._broker_side.is_open:
                # written, and never read by a broker that has closed the channel meanwhile
                return
            try:
                self._broker._settle(self._broker_side, tag, requeue=requeue, dead_letter=dead_letter)
            except _ChannelError as err:
                self._broker._close_channel(self._broker_side, err.code, err.text)

    # -- declaring ----------------------------------------------------------------------------------------------------

    def queue_declare(
        self, queue: str, passive: bool = False, durable: bool = False, arguments: dict[str, Any] | None = None
    ) -> pika.frame.Method:
        with self._request("queue_declare", queue, passive):
            declared = self._broker._declare_queue(queue, passive=passive, durable=durable, arguments=arguments or {})
            answer = spec.Queue.DeclareOk(queue, len(declared.messages), len(declared.consumers))
        return pika.frame.Method(self.channel_number, answer)

    def queue_bind(self, queue: str, exchange: str, routing_key: str | None = None) -> None:
        with self._request("queue_bind", queue, exchange):
            self._broker._bind(queue, exchange, queue if routing_key is None else routing_key)

    def queue_delete(self, queue: str) -> None:
        with self._request("queue_delete", queue):
            self._broker.delete_queue(queue)

    def exchange_declare(
        self, exchange: str, exchange_type: str = "direct", passive: bool = False, durable: bool = False
    ) -> None:
        with self._request("exchange_declare", exchange, passive):
            self._broker._declare_exchange(exchange, exchange_type, passive=passive, durable=durable)

    def exchange_delete(self, exchange: str) -> None:
        with self._request("exchange_delete", exchange):
            self._broker.delete_exchange(exchange)

    # -- publishing ---------------------------------------------------------------------------------------------------

    def confirm_delivery(self) -> None:
        with self._request("confirm_delivery"):
            self._confirms = True

    def basic_publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes,
        properties: pika.BasicProperties | None = None,
        mandatory: bool = False,
    ) -> None:
        """Publish; with confirms on, wait for the broker's word."""
        message = Message(body, _over_the_wire(properties or pika.BasicProperties()), exchange, routing_key)
        if not self._confirms:
            self._publish_and_forget(message)
            return
        verdict = ""
        with self._request("basic_publish", exchange, routing_key):
            verdict = self._broker._take_publish(message)
            if self._broker._links_to_drop_at_publish:
                self._broker._links_to_drop_at_publish -= 1
                self._broker.drop_link(self._connection)
        self._connection._read()
        if verdict == "nack":
            raise exceptions.NackError([])
        if verdict == "unroutable" and mandatory:
            raise exceptions.UnroutableError([])

    def _publish_and_forget(self, message: Message) -> None:
        self._connection._note("basic_publish", message.exchange, message.routing_key)
        self._raise_if_not_open()
        with self._broker._changed:
            try:
                self._broker._take_publish(message)
            except _ChannelError as err:
                self._broker._close_channel(self._broker_side, err.code, err.text)

    def close(self) -> None:
        with self._request("channel_close"):
            self._broker._forget_channel(self._broker_side)
            self.is_open = False
            self._consumers.clear()
            self._pending.clear()

    # -- the wire -----------------------------------------------------------------------------------------------------

    def _raise_if_not_open(self) -> None:
        if not self.is_open:
            raise exceptions.ChannelWrongStateError("Channel is closed.")

    @contextlib.contextmanager
    def _request(self, method: str, *arguments: Any) -> Iterator[None]:
        """Do something at the broker and wait for its answer; when it refuses, the channel is closed, and said so."""
        self._connection._note(method, *arguments)
        self._raise_if_not_open()
        self._connection._exchange_frames()
        self._raise_if_closed_by_broker()
        with self._broker._changed:
            try:
                yield
            except _ChannelError as err:
                self._broker._close_channel(self._broker_side, err.code, err.text)
            self._broker._changed.notify_all()
        self._connection._read()
        self._raise_if_closed_by_broker()

    def _raise_if_closed_by_broker(self) -> None:
        if not self.is_open and self._closing_reason is not None:
            raise self._closing_reason

    def _on_deliver(self, method: spec.Basic.Deliver, message: Message) -> None:
        tag = method.consumer_tag
        callback = self._consumers.get(tag)
        if tag in self._cancelling:
            self.basic_reject(method.delivery_tag, requeue=True)
        elif callback is not None and self.is_open:
            event = lambda: callback(self, method, message.properties, message.body)  # noqa: E731
            self._pending.append((tag, event, method.delivery_tag))
            self._ask_for_dispatch()

    def _on_cancel(self, tag: str) -> None:
        if tag in self._consumers and tag not in self._cancelling:
            self._pending.append((tag, lambda: self._consumers.pop(tag, None), None))
            self._ask_for_dispatch()

    def _on_closed(self, reason: Exception) -> None:
        self.is_open = False
        self._closing_reason = reason
        self._consumers.clear()
        self._pending.clear()
        self._connection._is_dispatch_asked = True

    def _ask_for_dispatch(self) -> None:
        self._is_dispatch_asked = self._connection._is_dispatch_asked = True

    def _reject_pending(self, consumer_tag: str) -> None:
        kept: deque[tuple[str, Callable[[], None], int | None]] = deque()
        for tag, event, delivery_tag in self._pending:
            if tag == consumer_tag and delivery_tag is not None:
                self.basic_reject(delivery_tag, requeue=True)
            elif tag != consumer_tag:
                kept.append((tag, event, delivery_tag))
        self._pending = kept

    def _dispatch(self) -> None:
        """Call consumers. After one that raises the rest stays undispatched until another event comes, silently."""
        if not self._is_dispatch_asked:
            return
        self._is_dispatch_asked = False
        while self._pending:
            _, event, _ = self._pending.popleft()
            event()


def _over_the_wire(properties: pika.BasicProperties) -> pika.BasicProperties:
    """Encode and decode with pika's own codec: what it cannot send raises here, and what it changes is changed."""
    return pika.BasicProperties().decode(b"".join(properties.encode()))


def _compared(declared: dict[str, Any], existing: dict[str, Any]) -> list[str]:
    """List the arguments that differ; a classic queue by name is the same as one by default."""
    names = sorted({*declared, *existing})
    default = {"x-queue-type": "classic"}
    return [name for name in names if declared.get(name, default.get(name)) != existing.get(name, default.get(name))]
