"""CRC-32 of bytes that were read in parts: the checksums of the parts give that of the whole.

A CRC-32 is the remainder of the bytes as a polynomial over GF(2). Behind it ``n`` bytes more mean
a multiplication by x^(8n), modulo CRC-32's polynomial; a polynomial is an integer here, with x^0 in
its highest bit.

Source: zlib 1.2.13 (M. Adler), crc32.c: ``crc32_combine``, ``x2nmodp`` and ``multmodp``, which
Python's zlib does not offer.
"""

from functools import lru_cache

POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30


def combined(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of bytes behind each other, by those of both and the length of the
    second."""
    return _product(_shift(second_bytes), first) ^ second


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials, of which the first is not 0."""
    product, bit = 0, _ONE
    while True:
        if a & bit:
            product ^= b
            if not a & (bit - 1):
                return product
        bit >>= 1
        b = (b >> 1) ^ POLYNOMIAL if b & 1 else b >> 1


def _squares() -> tuple[int, ...]:
    """Return x^(2^n) for n below 32; beyond they repeat."""
    found = [_X]
    while len(found) < 32:
        found.append(_product(found[-1], found[-1]))
    return tuple(found)


_SQUARES = _squares()


@lru_cache(maxsize=4096)
def _shift(size_bytes: int) -> int:
    """Return x^(8 * size_bytes)."""
    product, power = _ONE, 3
    while size_bytes:
        if size_bytes & 1:
            product = _product(_SQUARES[power & 31], product)
        size_bytes, power = size_bytes >> 1, power + 1
    return product
