"""A file of a web server, by the session of fsspec's own ``http`` file system.

Its ``cat_file`` takes whatever comes: the whole file, however large, of a server that sends no
ranges, and other bytes of one that compresses. Its ``info`` takes every error for a file that is
not there. So each answer is looked at here, before its bytes are: it is of the range that was asked
for, and of the file that was opened. That takes no further request.

Source: RFC 9110, 14.4 "Content-Range", 15.3.7 "206 Partial Content", 15.5.17 "416".
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from scalai.remote.calls import Calls
from scalai.remote.facts import Facts, check_same, facts_of
from scalai.remote.patience import FinalError

WHOLE_BYTES = 4 << 20
"""A file up to this size is read whole where the server sends no ranges."""
AT_ONCE = 16
"""Requests for ranges that are on their way together."""
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_PASSING = {408, 425, 429}
"""Answers of the 4xx that ask for another try."""


class HttpFile:
    """A file of a web server. Its methods may be called by several threads, and block."""

    def __init__(self, files: Any, url: str) -> None:
        self._files, self._url = files, url
        self._calls = Calls(files)

    def look(self, within_s: float) -> Facts:
        """Return what is known of the file now.

        Raises:
            FileNotFoundError: There is none. FinalError: It cannot be read in ranges.
            Exception: It does not answer.
        """
        facts: Facts = self._calls.run(self._look, within_s)
        return facts

    def read(self, facts: Facts, ranges: Sequence[tuple[int, int]], within_s: float) -> list[bytes]:
        """Return the bytes of each range ``[begin, end)`` of the file of these facts.

        Raises:
            ChangedError: The file is another one. Exception: As of ``look``.
        """
        found: list[bytes] = self._calls.run(lambda: self._read_all(facts, ranges), within_s)
        return found

    @asynccontextmanager
    async def _asked(self, begin: int, end: int) -> AsyncIterator[Any]:
        options = dict(self._files.kwargs)
        headers = {**options.pop("headers", {}), "Range": f"bytes={begin}-{end - 1}",
                   "Accept-Encoding": "identity"}  # fmt: skip
        session = await self._files.set_session()
        # Who leaves before the body was read closes the connection.
        async with session.get(
            self._files.encode_url(self._url), headers=headers, **options
        ) as answer:
            _check_status(answer)
            yield answer

    async def _look(self) -> Facts:
        async with self._asked(0, 1) as answer:
            facts = _facts(answer)
            if answer.status == 416 and facts.size_bytes is None:
                raise OSError("the server says 416, and no size")
            if answer.status == 200 and (facts.size_bytes or 0) > WHOLE_BYTES:
                raise FinalError(
                    f"its server sends no ranges, and the whole has {facts.size_bytes} bytes. Put "
                    "it on a server that does (nginx, Apache, an object store), or copy it here"
                )
            return facts

    async def _read_all(self, facts: Facts, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        free = asyncio.Semaphore(AT_ONCE)

        async def one(begin: int, end: int) -> bytes:
            async with free:
                return await self._read(facts, begin, end)

        tasks = [asyncio.ensure_future(one(begin, end)) for begin, end in ranges]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, facts: Facts, begin: int, end: int) -> bytes:
        async with self._asked(begin, end) as answer:
            if answer.status == 416:
                check_same(facts, await self._look())
                raise OSError(f"the server says that it has no bytes {begin} to {end}")
            now = _facts(answer)
            if now.size_bytes is None and now.tags == facts.tags:
                raise OSError("the server does not say which bytes it sends")
            check_same(facts, now)
            low, high = _places(answer, facts.size_bytes or 0)
            if high - low > max(WHOLE_BYTES, end - begin) or not low <= begin < end <= high:
                raise OSError(f"bytes {low} to {high} came instead of {begin} to {end}")
            data = await _body(answer, high - low)
            return data[begin - low : end - low]


def _check_status(answer: Any) -> None:
    """Raise where an answer has neither bytes nor a size."""
    status = answer.status
    if status in (200, 206, 416):
        return
    text = f"the server says {status} {answer.reason}"
    if status in (404, 410):
        raise FileNotFoundError(text)
    if status < 500 and status not in _PASSING:
        raise FinalError(text)
    raise OSError(text)


def _facts(answer: Any) -> Facts:
    said = {name: answer.headers.get(name) for name in ("ETag", "Last-Modified")}
    return facts_of({**said, "size": _size(answer)})


def _size(answer: Any) -> int | None:
    """Return the size of the whole file that an answer is of; None: it does not say."""
    if answer.headers.get("Content-Encoding", "identity") not in ("identity", ""):
        raise FinalError("its server compresses it, so that its places are unknown")
    if answer.status == 200:
        return int(answer.headers["Content-Length"]) if "Content-Length" in answer.headers else None
    match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    return int(match[3]) if match and match[3] != "*" else None


def _places(answer: Any, size: int) -> tuple[int, int]:
    """Return which bytes ``[low, high)`` an answer is of."""
    if answer.status == 200:
        return 0, size
    match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    return (int(match[1]), int(match[2]) + 1) if match and match[1] else (0, 0)


async def _body(answer: Any, length: int) -> bytes:
    """Return the bytes of an answer, of which there have to be so many."""
    parts, left = [], length + 1
    while left:
        data = await answer.content.read(left)
        if not data:
            break
        parts.append(data)
        left -= len(data)
    if left != 1:
        raise OSError(f"{'more' if left < 1 else length + 1 - left} bytes came instead of {length}")
    return b"".join(parts)
