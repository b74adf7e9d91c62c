"""A message as pieces that are cut where its content says so: two messages that share a long part,
at any place, share the pieces of it, and who has them need not be sent them again.

A cut comes where a hash of the last 16 bytes has ten bits that are 0, so every 1,024 bytes or so.
Source: content-defined chunking as in Muthitacharoen et al., "A low-bandwidth network file system"
(SOSP 2001), with the gear hash of Xia et al., "Ddelta" (2014).
"""

import hashlib

import numpy as np

LEAST_BYTES = 256
MOST_BYTES = 1 << 14
DIGEST_BYTES = 16

_MASK = np.uint32(0x3FF << 6)
_GEAR = np.random.Generator(np.random.PCG64(7)).integers(0, 1 << 32, 256, dtype=np.uint32)


def cut(data: bytes) -> list[bytes]:
    """Return the pieces of a message, in order; all of them together are the message."""
    hashed = _GEAR[np.frombuffer(data, np.uint8)]
    for width in (1, 2, 4, 8):  # of the last 2, 4, 8, 16 bytes
        hashed[width:] = hashed[width:] + (hashed[:-width] << np.uint32(width))
    pieces, begin = [], 0
    for end in (np.flatnonzero((hashed & _MASK) == 0) + 1).tolist():
        while end - begin > MOST_BYTES:
            pieces.append(data[begin : begin + MOST_BYTES])
            begin += MOST_BYTES
        if end - begin >= LEAST_BYTES:
            pieces.append(data[begin:end])
            begin = end
    while begin < len(data):
        pieces.append(data[begin : begin + MOST_BYTES])
        begin += MOST_BYTES
    return pieces


def digest_of(piece: bytes) -> bytes:
    """Return what tells a piece from any other."""
    return hashlib.sha256(piece).digest()[:DIGEST_BYTES]
