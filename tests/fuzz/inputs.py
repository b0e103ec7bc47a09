"""From what a fuzzer makes up to what a decoder is given.

The first bytes of an input steer the target (a status, a cap, a split); the rest is the body, either as it is or with
every byte from 0x80 on standing for a token. So the mutations of a byte-wise fuzzer write JSON, too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

_JSON = (
    *(b"{", b"}", b"[", b"]", b":", b",", b'"', b"null", b"true", b"false", b"0", b"-1", b"1.5e3", b"1e999", b"NaN"),
    *(b"9" * 20, b'"\\ud83d"', b'"\\ude00"', b"\\ud83d", b"\\u0061", b"\\", b" ", b"\n", b"[" * 60, b"]" * 60, b"{}"),
    *(b"[]", b'""', b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"\xef\xbf\xbd", b"\xef\xbb\xbf"),
)
REQUEST_TOKENS = (
    *_JSON,
    *(b'"request_id":', b'"received_at":', b'"timeout_s":', b'"payload":', b'"r-1"', b"1772000000.5", b"60"),
    *(b'"r":1,', b'"\\u0072equest_id":', b'{"request_id":"r","received_at":1,"timeout_s":2,"payload":{', b"}}"),
)
PAYLOAD_TOKENS = (
    *_JSON,
    *(b'"stream":', b'"stream_options":', b'"include_usage":', b'"stream":true', b'"include_usage":true'),
    *(b'"stream_options":{', b'"\\u0073tream":', b'"stream_optio\\u006es":', b'"a":', b'"messages":[{"content":"'),
)
STORED_TOKENS = (
    *_JSON,
    *(b'"status":', b'"completed"', b'"failed"', b'"status_code":', b"200", b'"result":', b'"error":', b'"x":1,'),
    *(b'{"status":"completed","status_code":200,"result":', b'"\\u0073tatus":', b'"comple\\u0074ed"', b"\t", b"\r"),
)
ANSWER_TOKENS = (
    *_JSON,
    *(b'"error":', b'"message":', b'"detail":', b'"object":', b'"error"', b'"choices":', b'"usage":', b'"metrics":'),
    *(b'"finish_reason":', b'"abort"', b'"stop"', b'"prompt_tokens":', b'"completion_tokens":', b'"cached_tokens":'),
    *(b'"prompt_tokens_details":', b'"queue_time_ms":', b'"time_to_first_token_ms":', b'"mean_itl_ms":', b'"code":'),
    *(b'{"choices":[{"finish_reason":', b'"usage":{"prompt_tokens":', b',"completion_tokens":', b'"message":"no"'),
)
STREAM_TOKENS = (
    *_JSON,
    *(b"data: ", b"data:", b"\n\n", b"\r\n\r\n", b"\r", b": x\n", b"data: [DONE]\n\n", b"event: x\n", b'"a"', b'"b"'),
    *(b'"choices":[', b'"index":', b'"delta":{', b'"content":', b'"tool_calls":[', b'"function":', b'"arguments":'),
    *(b'"name":', b'"id":', b'"role":', b'"finish_reason":', b'"stop"', b'"abort"', b'"logprobs":', b'"text":'),
    *(b'"usage":', b'"object":', b'"error":', b'"code":', b'"message":', b'"reasoning":', b'"type":', b'"refusal":'),
    *(b'data: {"choices":[{"index":0,"delta":{', b"}}]}\n\n", b'data: {"choices":[{"index":1,"text":', b"}]}\n\n"),
    *(b'"chat.completion.chunk"', b'"text_completion"', b'"prompt_tokens":', b'"completion_tokens":', b'"audio":{'),
    *(b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n', b'"function_call":{', b"[{}]"),
)


def expand(body: bytes, tokens: Sequence[bytes]) -> bytes:
    """Put the token for each byte that stands for one."""
    return b"".join([tokens[byte - 0x80] if 0 <= byte - 0x80 < len(tokens) else bytes((byte,)) for byte in body])


def contract(body: bytes, tokens: Sequence[bytes]) -> bytes:
    """Write a body with tokens, the longest first: a seed for mutations that are words, not letters."""
    by_length = sorted(enumerate(tokens, start=0x80), key=lambda pair: -len(pair[1]))
    written, at = bytearray(), 0
    while at < len(body):
        for byte, token in by_length:
            if body.startswith(token, at):
                written.append(byte)
                at += len(token)
                break
        else:
            written.append(body[at] & 0x7F)
            at += 1
    return bytes(written)


def pieces_of(stream: bytes, seed: int, cuts: int) -> Iterator[bytes]:
    """Cut a stream into up to `cuts` + 1 pieces, at places that the seed chooses; empty ones are among them."""
    # any scattering will do, and a generator of random numbers costs more than the parser
    ends = sorted((seed + 1) * (at + 1) * 7919 % (len(stream) + 1) for at in range(cuts))
    for start, end in zip([0, *ends], [*ends, len(stream)], strict=True):
        yield stream[start:end]


# -- header tables that a broker takes --------------------------------------------------------------------------------

_SCALARS = (
    *((b"t", 1), (b"b", 1), (b"B", 1), (b"s", 2), (b"u", 2), (b"I", 4), (b"i", 4)),
    *((b"l", 8), (b"f", 4), (b"d", 8), (b"T", 8), (b"D", 5), (b"V", 0)),
)
#: some beyond any recursion limit
_DEPTHS = (2, 4, 8, 15, 16, 17, 60, 600)
_BEYOND = 100
_NAMES = (b"x-retry-count", b"a", b"", b"\xff", b"x-death", b"CC", b"traceparent", b"n" * 255)


class TableMaker:
    """Makes a well-formed table of any bytes: each is an instruction or its operand."""

    def __init__(self, program: bytes) -> None:
        self._program = program
        self._at = 0
        self._is_wrapped = False
        #: nested beyond what a recursive reader can read
        self.is_deep = False

    def _take(self, length: int) -> bytes:
        taken = self._program[self._at : self._at + length].ljust(length, b"\0")
        self._at += length
        return taken

    def make(self) -> bytes:
        members = []
        while self._at < len(self._program):
            name = _NAMES[self._take(1)[0] % len(_NAMES)]
            members.append(bytes((len(name),)) + name + self._value(0))
        return b"".join(members)

    def _value(self, depth: int) -> bytes:
        instruction = self._take(1)[0]
        if instruction < 0x60 or depth > 8:
            kind, length = _SCALARS[instruction % len(_SCALARS)]
            content = self._take(length)
            if kind in b"fd" and content[0] & 0x7F == 0x7F:
                # NaN or infinite, or near: RabbitMQ takes neither
                content = bytes(length)
            return kind + content
        if instruction < 0xA0:
            content = self._take(instruction & 0x1F)
            return (b"S" if instruction & 0x20 else b"x") + struct.pack(">I", len(content)) + content
        if instruction < 0xF0 or self._is_wrapped:
            count = instruction & 0x03
            values = [self._value(depth + 1) for _ in range(count)]
            if instruction & 0x04:
                return _wrapped(b"A", b"".join(values))
            return _wrapped(b"F", b"".join(b"\x01" + bytes((0x61 + at,)) + value for at, value in enumerate(values)))
        # one value in many arrays or tables
        self._is_wrapped = True
        value = self._value(depth + 1)
        levels = _DEPTHS[instruction & 0x07]
        self.is_deep = levels >= _BEYOND
        return nested(value, levels, in_arrays=bool(instruction & 0x08))


def nested(value: bytes, levels: int, *, in_arrays: bool) -> bytes:
    """Wrap a value again and again; the lengths are worked out from the inside, the bytes are joined once."""
    kind, name = (b"A", b"") if in_arrays else (b"F", b"\x01a")
    heads: list[bytes] = []
    length = len(value)
    for _ in range(levels):
        heads.append(kind + struct.pack(">I", length + len(name)) + name)
        length += len(heads[-1])
    return b"".join(reversed(heads)) + value


def _wrapped(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack(">I", len(content)) + content
