"""A Redis that says exactly the bytes it is told, for the troubles that fakeredis does not have.

It speaks RESP on a real socket: a command is read whole, written down and answered. Runs on threads of its own.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

from timeouts import LONG_TIMEOUT_S

OK = b"+OK\r\n"
_HELLO = b"%2\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n"


class RespServer:
    """Answers each command by its name: what `answers` holds, else what a healthy Redis says to a SET.

    An answer of b"" ends the connection; None is silence for ever.
    """

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        #: by the name of a command; a list is used up one by one, and its last element stays
        self.answers: dict[str, bytes | list[bytes | None] | None] = {"HELLO": _HELLO}
        #: (connection, counted from 0; the command's words)
        self.commands: list[tuple[int, list[bytes]]] = []
        self.port: int = self._listening.getsockname()[1]
        self._start(self._accept)

    def sent(self, name: str) -> list[list[bytes]]:
        """Return the commands of this name that came."""
        return [words for _, words in self.commands if words[0].upper() == name.encode()]

    def stop(self) -> None:
        """End every connection and thread."""
        with self._lock:
            for connection in (self._listening, *self._open):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._listening.close()
        for thread in self._threads:
            thread.join(LONG_TIMEOUT_S)

    def _start(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="fake-resp", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with self._lock:
                self._open.append(connection)
            self._start(self._serve, connection, number)
            number += 1

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection, suppress(OSError), connection.makefile("rb") as reader:
            while words := self._read(reader):
                self.commands.append((number, words))
                answer = self._answer(words[0].decode().upper())
                if answer is None:
                    reader.read()
                    return
                if answer == b"":
                    return
                connection.sendall(answer)

    def _answer(self, name: str) -> bytes | None:
        answer = self.answers.get(name, OK)
        if isinstance(answer, list):
            return answer.pop(0) if len(answer) > 1 else answer[0]
        return answer

    @staticmethod
    def _read(reader: Any) -> list[bytes]:
        head = reader.readline()
        words = []
        for _ in range(int(head[1:]) if head else 0):
            length = int(reader.readline()[1:])
            words.append(reader.read(length + 2)[:-2])
        return words
