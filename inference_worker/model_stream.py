"""A streamed answer: server-sent events, the payload that asks for them, and one `chat.completion` out of many chunks.

Pure: any thread, no I/O, no clock. Knows how OpenAI, vLLM and their like write a stream; not HTTP, not what becomes of
the answer. JSON values are kept as the bytes that came, strings too: two JSON strings are joined by joining what is
between their quotes. So a number is never rounded, and halves of a surrogate pair that come in two chunks meet again.
Sources: design section 8 "Streaming"; the WHATWG's HTML standard, section 9.2 (server-sent events); field report R42.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum

import msgspec

from inference_worker.errors import HttpTooLarge
from inference_worker.json_text import has_surrogate_escape, is_json
from inference_worker.model_answer import read_body

_NULL = b"null"
_EMPTY_STRING = b'""'

# -- server-sent events -----------------------------------------------------------------------------------------------

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventStreamParser:
    """Takes an event stream apart, however it was cut into pieces. Owned by one thread; of no use after an error."""

    def __init__(self, *, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        #: what may become a BOM; None once the stream has begun
        self._head: bytearray | None = bytearray()
        #: a line whose end has not come
        self._line = bytearray()
        #: the last byte was a CR, which ended a line: an LF now belongs to it
        self._is_after_cr = False
        #: data lines of the event that is not over; None when it has none
        self._data: bytearray | None = None

    def feed(self, data: bytes) -> list[bytes]:
        r"""Take the next bytes, and return the data of each event that they complete.

        Shapes:  several `data` lines are joined by \n; an event without one is none; `event`, `id` and `retry` are
                 skipped; UTF-8 is not looked at
        Raises:  HttpTooLarge (one line, or the data of one event, is longer than max_event_bytes)
        Source:  HTML standard, section 9.2.6
        """
        data = self._after_bom(data)
        if data and self._is_after_cr:
            data = data.removeprefix(b"\n")
            self._is_after_cr = False
        if not data:
            return []
        self._is_after_cr = data.endswith(b"\r")
        *lines, rest = _LINE_END.split(data)
        events: list[bytes] = []
        for line in lines:
            if self._line:
                self._line += line
                line = bytes(self._line)
                self._line.clear()
            self._check(len(line))
            if line:
                self._read_field(line)
            elif self._data is not None:
                events.append(bytes(self._data))
                self._data = None
        self._line += rest
        self._check(len(self._line))
        return events

    def _after_bom(self, data: bytes) -> bytes:
        if self._head is None:
            return data
        self._head += data
        if len(self._head) < len(_BOM) and _BOM.startswith(self._head):
            return b""
        begun = bytes(self._head).removeprefix(_BOM)
        self._head = None
        return begun

    def _read_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name != b"data":
            return
        value = value.removeprefix(b" ")
        if self._data is None:
            self._data = bytearray(value)
        else:
            self._data += b"\n" + value
        self._check(len(self._data))

    def _check(self, have_bytes: int) -> None:
        if have_bytes > self._max_event_bytes:
            raise HttpTooLarge(f"an event of the stream is longer than {self._max_event_bytes} bytes")


# -- looking into JSON without parsing it -----------------------------------------------------------------------------

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,:\[\]{}\"]++")
#: the next bracket inside a value, with all before it, strings whole: depth is counted and not recursed into (R46)
_NESTED = re.compile(rb'(?:[^"{}\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+[{}\[\]]', re.DOTALL)


class _NotJson(Exception):
    """Never leaves this file."""


def _space_end(text: bytes, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _value_end(text: bytes, start: int) -> int:
    sign = text[start : start + 1]
    if sign not in (b"{", b"["):
        match = (_STRING if sign == b'"' else _SCALAR).match(text, start)
        if match is None:
            raise _NotJson
        return match.end()
    depth = 0
    while match := _NESTED.match(text, start):
        start = match.end()
        depth += 1 if text[start - 1] in b"{[" else -1
        if depth == 0:
            return start
    raise _NotJson


def _spans(text: bytes, start: int, closing: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Walk the members of the object, or the elements of the array, at `start`: (name, start of the value, its end).

    Shapes:  the text has been checked to be JSON; of an element the name is b""
    Raises:  _NotJson, where a text that was not checked makes no sense
    """
    at = _space_end(text, start + 1)
    while text[at : at + 1] != closing:
        name = b""
        if closing == b"}":
            match = _STRING.match(text, at)
            if match is None:
                raise _NotJson
            name, at = match.group(), _space_end(text, match.end())
            if text[at : at + 1] != b":":
                raise _NotJson
            at = _space_end(text, at + 1)
        end = _value_end(text, at)
        yield name, at, end
        at = _space_end(text, end)
        if text[at : at + 1] == b",":
            at = _space_end(text, at + 1)
        elif text[at : at + 1] != closing:
            raise _NotJson


def _decode_name(raw: bytes) -> str:
    try:
        name: str = json.loads(raw.decode())
    except ValueError as err:
        raise _NotJson from err
    return name


def _last_span(text: bytes, start: int, wanted: str) -> tuple[tuple[int, int] | None, int | None]:
    """Find the member that counts, the last of its name, and where the last member of all ends."""
    found, end_of_all = None, None
    for name, at, end in _spans(text, start, b"}"):
        end_of_all = end
        if _decode_name(name) == wanted:
            found = (at, end)
    return found, end_of_all


_OBJECT_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY_DECODER = msgspec.json.Decoder(list[msgspec.Raw])


def _members(raw: bytes | msgspec.Raw) -> Mapping[str, bytes | msgspec.Raw]:
    """Take an object apart; of a name given twice the last counts. The bytes have been checked to be JSON.

    Raises:  _NotJson (it is no object)
    """
    try:
        return _OBJECT_DECODER.decode(raw)
    except msgspec.ValidationError as err:
        raise _NotJson from err
    except msgspec.DecodeError as err:
        # a lone surrogate escape: legal grammar, but not for msgspec (R45)
        text = bytes(raw).strip()
        if not text.startswith(b"{"):
            raise _NotJson from err
        return {_decode_name(name): text[at:end] for name, at, end in _spans(text, 0, b"}")}


def _elements(raw: bytes | msgspec.Raw) -> list[msgspec.Raw] | list[bytes]:
    """Take an array apart, as `_members` does an object; null has no elements."""
    text = bytes(raw)
    if text == _NULL:
        return []
    if not text.startswith(b"["):
        raise _NotJson
    try:
        return _ARRAY_DECODER.decode(text)
    except msgspec.DecodeError:
        return [text[at:end] for _, at, end in _spans(text, 0, b"]")]


# -- the payload ------------------------------------------------------------------------------------------------------


class _Asked(msgspec.Struct):
    stream: msgspec.Raw = msgspec.Raw(b"")


_ASKED_DECODER = msgspec.json.Decoder(_Asked)


def wants_stream(payload: bytes) -> bool:
    """Tell whether the payload asks for a stream: `stream` is exactly true, by the last of its occurrences.

    False for "true" and 1, although vLLM streams for them (R42), and for what is no JSON object.
    """
    if b"stream" not in payload and b"\\u" not in payload:
        return False
    try:
        return bytes(_ASKED_DECODER.decode(payload).stream) == b"true"
    except RecursionError:
        return False
    except msgspec.DecodeError:
        return _wants_stream_at_second_look(payload)


def _wants_stream_at_second_look(payload: bytes) -> bool:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return False
    start = _space_end(payload, 0)
    if payload[start : start + 1] != b"{" or not has_surrogate_escape(text) or not is_json(text):
        return False
    span, _ = _last_span(payload, start, "stream")
    return span is not None and payload[span[0] : span[1]] == b"true"


def with_usage(payload: bytes) -> bytes:
    """Return the payload with `stream_options.include_usage` true, without which nothing could be billed.

    Shapes:  the payload is a JSON object; every byte of it outside of that member stays; the same object comes back
             when it is true already (and when the payload is no JSON object: then the model decides)
    Source:  design section 8
    """
    start = _space_end(payload, 0)
    if payload[start : start + 1] != b"{":
        return payload
    try:
        options, end_of_all = _last_span(payload, start, "stream_options")
        if options is None:
            return _insert(payload, start, end_of_all, b'"stream_options":{"include_usage":true}')
        at, end = options
        if payload[at : at + 1] != b"{":
            return payload[:at] + b'{"include_usage":true}' + payload[end:]
        usage, end_of_all = _last_span(payload, at, "include_usage")
    except _NotJson:
        return payload
    if usage is None:
        return _insert(payload, at, end_of_all, b'"include_usage":true')
    at, end = usage
    return payload if payload[at:end] == b"true" else payload[:at] + b"true" + payload[end:]


def _insert(payload: bytes, start: int, end_of_all: int | None, member: bytes) -> bytes:
    """Put one more member behind the last one of the object at `start`."""
    if end_of_all is None:
        return payload[: start + 1] + member + payload[start + 1 :]
    return payload[:end_of_all] + b"," + member + payload[end_of_all:]


# -- what the chunks say ----------------------------------------------------------------------------------------------


class ChunkKind(StrEnum):
    """What one event of the stream is."""

    #: a piece of the answer
    PIECE = "piece"
    #: `[DONE]`: nothing follows
    DONE = "done"
    #: the model says that it failed; `error` tells how
    ERROR = "error"
    #: no JSON object, or none that is a chunk; `problem` tells why. The whole answer is invalid
    INVALID = "invalid"
    #: came after one of the three above, and was not looked at
    IGNORED = "ignored"


class StreamError(msgspec.Struct, frozen=True):
    """An error event in the middle of a stream whose HTTP status was 200."""

    #: its code where that is an HTTP error status, else 500
    status_code: int
    #: the server's own words
    message: str | None
    #: the event's data, byte for byte: a JSON object
    body: bytes


class ChunkFacts(msgspec.Struct, frozen=True):
    """What one event says."""

    kind: ChunkKind
    #: it carries text, reasoning or a tool call, not empty: the first such chunk ends the time to first token
    has_token: bool = False
    #: a choice ends with `finish_reason: "abort"`: the model is going away
    is_aborted: bool = False
    error: StreamError | None = None
    problem: str = ""


class StreamEnd(StrEnum):
    """What the stream as a whole has been."""

    #: `[DONE]` came, or every choice has its finish reason
    COMPLETE = "complete"
    #: a choice ended with `finish_reason: "abort"`: never an answer
    ABORTED = "aborted"
    #: it held an error event
    ERROR = "error"
    #: it held what is no chunk
    INVALID = "invalid"
    #: `[DONE]`, and not one chunk before it
    EMPTY = "empty"
    #: it stops in the middle, or before it began
    CUT_OFF = "cut_off"


class AssembledAnswer(msgspec.Struct, frozen=True):
    """What a stream amounts to."""

    end: StreamEnd
    #: strict UTF-8 JSON; only of a COMPLETE stream
    body: bytes | None = None
    #: when end is ERROR
    error: StreamError | None = None
    #: when end is INVALID
    problem: str = ""

    @property
    def is_complete(self) -> bool:
        return self.end is StreamEnd.COMPLETE


# -- assembly ---------------------------------------------------------------------------------------------------------

#: said once, or said again in each chunk, but never in pieces: the first that says something counts
_SAID_WHOLE = frozenset({"id", "type", "index", "role", "object", "created", "model", "expires_at"})
_TEXTS = frozenset({"content", "refusal", "reasoning", "reasoning_content"})
#: deeper objects are not merged: the last one counts
_MERGE_DEPTH = 3
#: what a member costs in memory beside its bytes, so that a cap on the body bounds the memory as well
_MEMBER_BYTES = 128
_INDEX = re.compile(rb"\d{1,6}")
_CHAT_CHUNK = b'"chat.completion.chunk"'
_OBJECT_NAMES = {
    _CHAT_CHUNK: b'"chat.completion"',
    b'"text_completion.chunk"': b'"text_completion"',
}


class _Joined:
    """A string or an array that comes in pieces: what is between its quotes or brackets."""

    __slots__ = ("inner", "opening")

    def __init__(self, opening: bytes) -> None:
        self.opening = opening
        self.inner = bytearray()

    def append(self, raw: bytes) -> int:
        """Add a piece, and return by how many bytes this has grown."""
        before = len(self.inner)
        piece = raw[1:-1]
        if self.opening == b"[":
            piece = piece.strip()
            if piece and before:
                self.inner += b","
        self.inner += piece
        return len(self.inner) - before

    def encode(self) -> bytes:
        return self.opening + self.inner + (b'"' if self.opening == b'"' else b"]")


class _Merged:
    """An object that comes in pieces. Strings and arrays grow, objects are merged, of anything else the last counts.

    null says nothing: it never replaces a value, and stays where there is none.
    """

    __slots__ = ("_depth", "members")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self.members: dict[str, bytes | _Joined | _Merged] = {}

    def add(self, name: str, raw: bytes, *, in_pieces: bool = True) -> int:
        """Add one member of a piece, and return by how many bytes this has grown."""
        old = self.members.get(name)
        grown = 0 if old is not None else len(json.dumps(name)) + _MEMBER_BYTES
        if raw == _NULL and old is not None:
            return 0
        if name in _SAID_WHOLE:
            if old is None or old in (_NULL, _EMPTY_STRING, b"0"):
                grown += self._replace(name, raw)
            return grown
        kind = raw[:1]
        if in_pieces and kind in (b'"', b"["):
            if not isinstance(old, _Joined) or old.opening != kind:
                grown += self._replace(name, b"")
                old = self.members[name] = _Joined(kind)
            return grown + old.append(raw)
        if in_pieces and kind == b"{" and self._depth < _MERGE_DEPTH:
            if not isinstance(old, _Merged):
                grown += self._replace(name, b"")
                old = self.members[name] = _Merged(self._depth + 1)
            return grown + old.add_all(_members(raw))
        return grown + self._replace(name, raw)

    def add_all(self, members: Mapping[str, bytes | msgspec.Raw]) -> int:
        return sum(self.add(name, bytes(raw)) for name, raw in members.items())

    def _replace(self, name: str, raw: bytes) -> int:
        old = self.members.get(name)
        self.members[name] = raw
        return len(raw) - (len(old) if isinstance(old, bytes) else 0)

    def says(self, name: str) -> bool:
        """Tell whether there is text under this name."""
        return self.text_of(name) not in (b"", _NULL, _EMPTY_STRING)

    def text_of(self, name: str) -> bytes:
        value = self.members.get(name, b"")
        return value if isinstance(value, bytes) else value.encode()

    def encode(self) -> bytes:
        return _encode_object({name: self.text_of(name) for name in self.members})


def _encode_object(members: Mapping[str, bytes]) -> bytes:
    return b"{%b}" % b",".join(b"%b:%b" % (json.dumps(name).encode(), raw) for name, raw in members.items())


class _ToolCalls:
    """The tool calls of one message, by their index."""

    def __init__(self) -> None:
        self._calls: dict[int, _Merged] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, raw: bytes | msgspec.Raw) -> int:
        piece = _members(raw)
        index = self._last = self._find_index(piece)
        grown = 0
        if index not in self._calls:
            self._calls[index] = _Merged()
            grown = _MEMBER_BYTES
        call = self._calls[index]
        is_repeated = call.says("id") and bytes(piece.get("id", _NULL)) == call.text_of("id")
        for name, value in piece.items():
            member = bytes(value)
            if name != "function":
                grown += call.add(name, member)
            elif member != _NULL:
                grown += self._add_function(call, member, is_repeated=is_repeated)
        return grown

    def _find_index(self, piece: Mapping[str, bytes | msgspec.Raw]) -> int:
        raw = bytes(piece.get("index", b""))
        if _INDEX.fullmatch(raw):
            return int(raw)
        # servers that number nothing send whole calls: another id is another call
        call_id = bytes(piece.get("id", _NULL))
        known = self._calls.get(self._last)
        if known is not None and call_id not in (_NULL, _EMPTY_STRING, known.text_of("id")):
            return max(self._calls) + 1
        return self._last

    @staticmethod
    def _add_function(call: _Merged, raw: bytes, *, is_repeated: bool) -> int:
        function = dict(_members(raw))
        known = call.members.get("function")
        if not isinstance(known, _Merged):
            known = call.members["function"] = _Merged(1)
            return _MEMBER_BYTES + known.add_all(function)
        if is_repeated and bytes(function.get("name", _NULL)) == known.text_of("name"):
            # a server that repeats the id in each piece repeats the name as well; else a name may come in pieces
            del function["name"]
        return known.add_all(function)

    def encode(self) -> bytes:
        return b"[%b]" % b",".join(self._encode_call(call) for _, call in sorted(self._calls.items()))

    @staticmethod
    def _encode_call(call: _Merged) -> bytes:
        members = {name: call.text_of(name) for name in call.members if name != "index"}
        function = call.members.get("function")
        if isinstance(function, _Merged):
            if not call.says("type"):
                members["type"] = b'"function"'
            arguments = {name: function.text_of(name) for name in function.members}
            if arguments.get("arguments", _NULL) == _NULL:
                arguments["arguments"] = _EMPTY_STRING
            members["function"] = _encode_object(arguments)
        return _encode_object(members)


class _Choice:
    """One choice: of a chat (`delta`, which becomes `message`) or of a completion (`text`)."""

    def __init__(self) -> None:
        self._fields = _Merged()
        self._message = _Merged()
        self._calls = _ToolCalls()
        self.has_delta = False
        self.has_token = False

    @property
    def is_finished(self) -> bool:
        return self._fields.says("finish_reason")

    def add(self, members: Mapping[str, bytes | msgspec.Raw]) -> int:
        """Add one piece, and return by how many bytes this has grown."""
        grown = 0
        self.has_token = False
        for name, value in members.items():
            raw = bytes(value)
            if name == "delta":
                # keeps its place for the message
                grown += self._fields.add("message", _NULL)
                grown += self._add_delta(raw)
            elif name in ("text", "logprobs", "token_ids"):
                self.has_token |= name == "text" and raw not in (_NULL, _EMPTY_STRING)
                grown += self._fields.add(name, raw)
            else:
                grown += self._fields.add(name, raw, in_pieces=False)
        return grown

    def _add_delta(self, delta: bytes) -> int:
        self.has_delta = True
        grown = 0
        if delta == _NULL:
            return 0
        for name, value in _members(delta).items():
            raw = bytes(value)
            if name == "tool_calls":
                grown += self._message.add(name, _NULL if raw == _NULL else b"[]", in_pieces=False)
                for call in _elements(raw):
                    grown += self._calls.add(call)
                    self.has_token = True
                continue
            self.has_token |= name in _TEXTS and raw not in (_NULL, _EMPTY_STRING)
            self.has_token |= name in ("function_call", "audio") and raw not in (_NULL, b"{}")
            grown += self._message.add(name, raw)
        return grown

    def encode(self, index: int, *, is_chat: bool) -> bytes:
        members = {"index": b"%d" % index}
        members |= {name: self._fields.text_of(name) for name in self._fields.members if name != "index"}
        if is_chat and members.get("message", _NULL) == _NULL:
            members["message"] = self._encode_message()
        elif not is_chat and members.get("text", _NULL) == _NULL:
            members["text"] = _EMPTY_STRING
        for name in ("logprobs", "finish_reason"):
            members.setdefault(name, _NULL)
        return _encode_object(members)

    def _encode_message(self) -> bytes:
        said = self._message
        members = {"role": b'"assistant"', "content": _NULL, "refusal": _NULL}
        members |= {name: said.text_of(name) for name in said.members}
        if members["role"] == _NULL:
            members["role"] = b'"assistant"'
        if self._calls:
            members["tool_calls"] = self._calls.encode()
        if members["content"] == _EMPTY_STRING and (self._calls or any(map(said.says, _TEXTS))):
            # the first chunk's "" only comes with the role; a message that says nothing but this has no content
            members["content"] = _NULL
        return _encode_object(members)


class Assembly:
    """Makes of a stream's chunks the body that the server gives without streaming. Owned by one thread.

    What a stream does not carry is not in the body, save what every completion has: `choices`, `index`, `message` (with
    `role`, `content` and `refusal`) or `text`, `logprobs`, `finish_reason`. What vLLM 0.32 leaves out is null in the
    plain answer: `service_tier`, `prompt_logprobs`, `kv_transfer_params`, `ec_transfer_params`, `routed_experts`,
    details of usage and metrics, and of a message `annotations`, `audio`, `function_call`, `reasoning`.
    """

    def __init__(self, *, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._have_bytes = 0
        self._fields = _Merged()
        self._choices: dict[int, _Choice] = {}
        self._is_aborted = False
        #: what ended the stream, other than its own end
        self._last: ChunkFacts | None = None

    def add(self, data: bytes) -> ChunkFacts:
        """Take the data of the next event.

        Raises:  HttpTooLarge (the answer is longer than max_body_bytes)
        """
        if self._last is not None:
            return ChunkFacts(ChunkKind.IGNORED)
        facts = self._read(data)
        if facts.kind is not ChunkKind.PIECE:
            self._last = facts
        return facts

    def _read(self, data: bytes) -> ChunkFacts:
        if data.strip() == b"[DONE]":
            return ChunkFacts(ChunkKind.DONE)
        try:
            chunk = _decode_chunk(data)
            if _is_error(chunk):
                return ChunkFacts(ChunkKind.ERROR, error=_read_error(data, chunk))
            return self._add_chunk(chunk)
        except UnicodeDecodeError:
            return ChunkFacts(ChunkKind.INVALID, problem="a chunk of the stream is not UTF-8")
        except RecursionError:
            return ChunkFacts(ChunkKind.INVALID, problem="a chunk of the stream is nested too deeply")
        except _NotJson:
            return ChunkFacts(ChunkKind.INVALID, problem="a chunk of the stream is no JSON object or no chunk")

    def _add_chunk(self, chunk: Mapping[str, bytes | msgspec.Raw]) -> ChunkFacts:
        has_token = is_aborted = False
        grown = 0
        for name, value in chunk.items():
            if name != "choices":
                grown += self._fields.add(name, bytes(value), in_pieces=False)
                continue
            # keeps its place
            grown += self._fields.add(name, _NULL)
            for piece in map(_members, _elements(value)):
                index = _read_index(piece)
                if index not in self._choices:
                    self._choices[index] = _Choice()
                    grown += 8 * _MEMBER_BYTES
                choice = self._choices[index]
                grown += choice.add(piece)
                has_token |= choice.has_token
                is_aborted |= bytes(piece.get("finish_reason", _NULL)) == b'"abort"'
        self._is_aborted |= is_aborted
        self._have_bytes += grown
        if self._have_bytes > self._max_body_bytes:
            raise HttpTooLarge(f"the streamed answer is longer than {self._max_body_bytes} bytes")
        return ChunkFacts(ChunkKind.PIECE, has_token=has_token, is_aborted=is_aborted)

    def finish(self) -> AssembledAnswer:
        """Say what the stream amounts to, now that it has ended."""
        end = self._classify_end()
        error, problem = (self._last.error, self._last.problem) if self._last is not None else (None, "")
        return AssembledAnswer(end, self._encode() if end is StreamEnd.COMPLETE else None, error, problem)

    def _classify_end(self) -> StreamEnd:
        is_done = False
        if self._last is not None:
            match self._last.kind:
                case ChunkKind.ERROR:
                    return StreamEnd.ERROR
                case ChunkKind.INVALID:
                    return StreamEnd.INVALID
            is_done = True
        if self._is_aborted:
            return StreamEnd.ABORTED
        if is_done and not self._have_bytes:
            return StreamEnd.EMPTY
        is_finished = bool(self._choices) and all(choice.is_finished for choice in self._choices.values())
        return StreamEnd.COMPLETE if is_done or is_finished else StreamEnd.CUT_OFF

    def _encode(self) -> bytes:
        members = {name: self._fields.text_of(name) for name in self._fields.members}
        said = members.get("object", _NULL)
        is_chat = said == _CHAT_CHUNK or any(choice.has_delta for choice in self._choices.values())
        if said == _NULL:
            said = _CHAT_CHUNK if is_chat else b'"text_completion"'
        members["object"] = _OBJECT_NAMES.get(said, said)
        choices = (choice.encode(at, is_chat=is_chat) for at, choice in sorted(self._choices.items()))
        members["choices"] = b"[%b]" % b",".join(choices)
        return _encode_object(members)


def _decode_chunk(data: bytes) -> Mapping[str, bytes | msgspec.Raw]:
    # msgspec does not look at the bytes of what it keeps raw
    text = data.decode()
    try:
        return _OBJECT_DECODER.decode(data)
    except msgspec.DecodeError as err:
        if not has_surrogate_escape(text) or not is_json(text):
            raise _NotJson from err
        return _members(data)


def _read_index(choice: Mapping[str, bytes | msgspec.Raw]) -> int:
    raw = bytes(choice.get("index", b"0"))
    if not _INDEX.fullmatch(raw):
        raise _NotJson
    return int(raw)


def _is_error(chunk: Mapping[str, bytes | msgspec.Raw]) -> bool:
    if bytes(chunk.get("error", _NULL)) != _NULL:
        return True
    said = bytes(chunk.get("object", _NULL))
    return said.startswith(b'"') and _decode_name(said) == "error"


def _read_error(data: bytes, chunk: Mapping[str, bytes | msgspec.Raw]) -> StreamError:
    codes = [bytes(chunk.get("code", b""))]
    error = bytes(chunk.get("error", _NULL))
    if error.startswith(b"{"):
        codes.insert(0, bytes(_members(error).get("code", b"")))
    status_codes = [int(code) for code in (raw.strip(b'"') for raw in codes) if re.fullmatch(rb"[45]\d\d", code)]
    return StreamError(status_codes[0] if status_codes else 500, read_body(data).error_message, data)
