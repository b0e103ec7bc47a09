"""A streamed answer: the chunks that a model server sends, and one completion out of many of them.

Pure: any thread, no I/O, no clock. Knows how OpenAI, vLLM and their like write a stream; not HTTP, not what becomes of
the answer. JSON values are kept as the bytes that came, strings too: two JSON strings are joined by joining what is
between their quotes. So a number is never rounded, and halves of a surrogate pair that come in two chunks meet again.
Source: design section 8 "Streaming".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from inference_worker.errors import HttpTooLarge
from inference_worker.json_spans import NotJson, checked_members_of, decode_name, elements_of, encode_object, members_of
from inference_worker.model_answer import NO_ERROR, read_body

_NULL = b"null"
_EMPTY_STRING = b'""'

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
            return grown + old.add_all(members_of(raw))
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
        return encode_object({name: self.text_of(name) for name in self.members})


class _ToolCalls:
    """The tool calls of one message, by their index."""

    def __init__(self) -> None:
        self._calls: dict[int, _Merged] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, raw: bytes | msgspec.Raw) -> int:
        piece = members_of(raw)
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
        function = dict(members_of(raw))
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
            members["function"] = encode_object(arguments)
        return encode_object(members)


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
        for name, value in members_of(delta).items():
            raw = bytes(value)
            if name == "tool_calls":
                grown += self._message.add(name, _NULL if raw == _NULL else b"[]", in_pieces=False)
                for call in elements_of(raw):
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
        return encode_object(members)

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
        return encode_object(members)


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
            chunk = checked_members_of(data)
            if _is_error(chunk):
                return ChunkFacts(ChunkKind.ERROR, error=_read_error(data, chunk))
            return self._add_chunk(chunk)
        except UnicodeDecodeError:
            return ChunkFacts(ChunkKind.INVALID, problem="a chunk of the stream is not UTF-8")
        except RecursionError:
            return ChunkFacts(ChunkKind.INVALID, problem="a chunk of the stream is nested too deeply")
        except NotJson:
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
            for piece in map(members_of, elements_of(value)):
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
        return encode_object(members)


def _read_index(choice: Mapping[str, bytes | msgspec.Raw]) -> int:
    raw = bytes(choice.get("index", b"0"))
    if not _INDEX.fullmatch(raw):
        raise NotJson
    return int(raw)


def _is_error(chunk: Mapping[str, bytes | msgspec.Raw]) -> bool:
    if bytes(chunk.get("error", _NULL)) not in NO_ERROR:
        return True
    said = bytes(chunk.get("object", _NULL))
    return said.startswith(b'"') and decode_name(said) == "error"


def _read_error(data: bytes, chunk: Mapping[str, bytes | msgspec.Raw]) -> StreamError:
    codes = [bytes(chunk.get("code", b""))]
    error = bytes(chunk.get("error", _NULL))
    if error.startswith(b"{"):
        codes.insert(0, bytes(members_of(error).get("code", b"")))
    status_codes = [int(code) for code in (raw.strip(b'"') for raw in codes) if re.fullmatch(rb"[45]\d\d", code)]
    return StreamError(status_codes[0] if status_codes else 500, read_body(data).error_message, data)
