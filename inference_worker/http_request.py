"""The head of an HTTP/1.1 request as bytes: what is the same for every request to a URL is made once.

Pure: any thread, no I/O. http.client and urllib3 build each line of each request anew, which was a tenth of a message's
CPU. Source: RFC 9112, sections 3 and 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from mmap import mmap

#: a large one may be in a mapping of its own
Body = bytes | mmap
#: would end a header, and begin what its value wants
_UNFIT = re.compile(rb"[\r\n\0]")


def request_start(method: str, path: str, host: str) -> bytes:
    """Write what every request to one URL begins with.

    Shapes:  path with its query, quoted; host as in the URL, with its port where it has one
    """
    lines = (f"{method} {path} HTTP/1.1", f"Host: {host}", "Accept-Encoding: identity", "User-Agent: inference_worker")
    return "".join(f"{line}\r\n" for line in lines).encode("ascii")


def request_head(start: bytes, headers: Mapping[str, str | bytes], body: Body | None) -> bytes:
    """Write the whole head of one request; names of headers are ours, values may be anybody's.

    Raises:  ValueError (a value that cannot be sent; its text may hold it)
    """
    parts = [start]
    for name, value in headers.items():
        raw = value if isinstance(value, bytes) else value.encode("latin-1")
        if _UNFIT.search(raw):
            raise ValueError("a header with a line break")
        parts.append(b"%b: %b\r\n" % (name.encode("ascii"), raw))
    parts.append(b"\r\n" if body is None else b"Content-Length: %d\r\n\r\n" % len(body))
    return b"".join(parts)
