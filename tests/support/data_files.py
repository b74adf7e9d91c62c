"""Small data sets on a disk, for tests of what reads them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scalai.vfs.token_index import index_content


def lines(count: int) -> list[bytes]:
    """Return lines of JSON of different lengths."""
    return [b'{"n": %d, "text": "%s"}\n' % (n, b"x" * (n % 17)) for n in range(count)]


def write_tokens(
    prefix: Path, lengths: Sequence[int]
) -> "np.ndarray[tuple[int], np.dtype[np.uint16]]":
    """Write Megatron's ``.bin`` and ``.idx`` of sequences of these lengths; return the tokens."""
    tokens = np.random.default_rng(1).integers(0, 60000, sum(lengths)).astype(np.uint16)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens.tobytes())
    length = np.array(lengths)
    begin = (np.cumsum(length) - length) * 2
    content = index_content(
        np.dtype(np.uint16), len(length), lambda a, b: length[a:b], lambda a, b: begin[a:b]
    )
    index = prefix.with_name(prefix.name + ".idx")
    index.write_bytes(content.read(0, content.size_bytes))
    return tokens
