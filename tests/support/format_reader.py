"""A reader of generations that was written from ``docs/format.md``: numpy and the standard library,
and nothing of Scalai."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
LARGEST = (1 << 64) - 1
MODULUS = (1 << 64) - 59
MASK, SEGMENT = (1 << 64) - 1, 128


class FormatError(Exception):
    """What a reader refuses."""


def expect(is_so: bool, where: object, what: str) -> None:
    if not is_so:
        raise FormatError(f"{where}: {what}")


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the file that it lies in from byte ``begin`` on."""

    tensor: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path
    begin: int
    fingerprint: int


@dataclass(frozen=True)
class Part:
    """One host's part; ``fields`` are those of its manifest."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    pieces: tuple[Piece, ...]


def read_part(directory: Path, number: int | None = None) -> Part:
    """Read one part, of this generation."""
    path = directory / "manifest.json"
    try:
        content = json.loads(path.read_text("utf-8"), object_pairs_hook=_distinct)
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: {error}") from error
    expect(isinstance(content, dict), path, "no object")
    try:
        _check_fields(content, path)
        tensors, pieces = _table(content, directory, path)
    except KeyError as error:
        raise FormatError(f"{path}: no field {error}") from error
    expect(number in (None, content["generation"]), path, "of another generation")
    for name, size in content["files"]:
        there = (directory / name).stat().st_size if (directory / name).is_file() else None
        expect(there == size, directory / name, f"{there} bytes, not {size}")
    return Part(content, tensors, pieces)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value[:1] not in ("", ".") and not {"/", "\0"} & {*value}


def _is_print(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None


def _are(values: Any, is_one: Any) -> bool:
    return isinstance(values, list) and all(map(is_one, values))


def _check_fields(content: Mapping[str, Any], path: Path) -> None:
    """Check versions and digest, and every field by itself."""
    version, prints = content["version"], content["fingerprint_version"]
    expect(content["format"] == "scalai-generation", path, "another format")
    expect(type(version) is int and version == 3, path, "an unknown version")
    expect(type(prints) is int and prints == 2, path, "unknown fingerprints")
    rest = {key: value for key, value in content.items() if key != "digest"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    expect(content["digest"] == hashlib.sha256(canonical).hexdigest(), path, "digest")
    expect(_is_whole(content["generation"], 0), path, "generation")
    expect(_is_whole(content["step"]), path, "step")
    expect(_is_name(content["host"]), path, "host")
    for name in ("about", "scalars", "rank_state", "collection"):
        expect(isinstance(content[name], dict), path, name)
    about = content["about"]
    expect(_is_whole(about["tensors"]) and _is_whole(about["world_size"]), path, "about")
    sizes = about["degrees"].values() if isinstance(about["degrees"], dict) else [0]
    expect(all(_is_whole(size, 1) for size in sizes), path, "degrees")
    for name in ("ranks", "unproven"):
        values = content[name] if name == "ranks" else content.get(name, [])
        expect(_are(values, _is_whole) and len(set(values)) == len(values), path, name)
    if "committed" in content:
        committed = content["committed"]
        expect(isinstance(committed, dict), path, "committed")
        expect(_are(committed["hosts"], lambda host: isinstance(host, str)), path, "hosts")
        expect(_are([*committed["fingerprints"].values()], _is_print), path, "fingerprints")


def _table(
    content: Mapping[str, Any], directory: Path, path: Path
) -> tuple[dict[str, tuple[tuple[int, ...], str]], tuple[Piece, ...]]:
    """Return the tensors by name, and the pieces, row by row."""
    collection, files = content["collection"], content["files"]
    expect(_are(files, lambda entry: isinstance(entry, list) and len(entry) == 2), path, "files")
    expect(all(_is_name(name) and _is_whole(size) for name, size in files), path, "files")
    expect(len({name for name, _ in files}) == len(files), path, "a file twice")
    expect(all(number < len(files) for number in content.get("unproven", [])), path, "unproven")
    tensors = {}
    for name, shape, dtype in collection["tensors"]:
        expect(isinstance(name, str) and name not in tensors, path, f"tensor {name}")
        expect(_are(shape, _is_whole) and len(shape) <= 6, path, f"shape of {name}")
        expect(dtype in ITEM_BYTES, path, f"dtype {dtype}")
        size = prod(max(size, 1) for size in shape) * ITEM_BYTES[dtype]
        expect(size <= 1 << 60, path, f"size of {name}")
        tensors[name] = (tuple(shape), dtype)
    columns = [collection["tensor"], collection["offset"], collection["shape"],
               content["file"], content["begin"], content["fingerprint"]]  # fmt: skip
    expect(all(isinstance(column, list) for column in columns), path, "columns")
    expect(len({len(column) for column in columns}) == 1, path, "columns of unequal length")
    pieces = []
    for tensor, offset, shape, file, begin, print_ in zip(*columns, strict=True):
        expect(_is_whole(tensor) and tensor < len(tensors), path, "tensor")
        expect(_is_whole(file) and file < len(files) and _is_whole(begin), path, "file")
        expect(_are(offset, _is_whole) and _are(shape, _is_whole), path, "box")
        expect(len(offset) == len(shape) == 6, path, "box")
        name = collection["tensors"][tensor][0]
        whole, dtype = tensors[name]
        skip = 6 - len(whole)
        expect(offset[:skip] == [0] * skip and shape[:skip] == [1] * skip, path, "box")
        low, sizes = tuple(offset[skip:]), tuple(shape[skip:])
        inside = all(a + n <= full for a, n, full in zip(low, sizes, whole, strict=True))
        expect(inside, path, f"a piece outside of {name}")
        expect(begin + prod(sizes) * ITEM_BYTES[dtype] <= files[file][1], path, "beyond its file")
        value = int(print_, 16) if _is_print(print_) else LARGEST
        expect(value < MODULUS, path, "fingerprint")
        pieces.append(Piece(name, low, sizes, directory / files[file][0], begin, value))
    return tensors, tuple(pieces)


class Generation:
    """A whole generation: its parts, checked against each other."""

    def __init__(self, directories: Iterable[Path], number: int | None = None) -> None:
        parts = [read_part(directory, number) for directory in directories]
        self.parts = sorted(
            parts,
            key=lambda part: (min(part.fields["ranks"], default=LARGEST), part.fields["host"]),
        )
        first = self.parts[0]
        self.step = first.fields["step"]
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        for part in self.parts:
            expect(_state(part) == _state(first), part.fields["host"], "of another state")
            for name, tensor in part.tensors.items():
                expect(self.tensors.setdefault(name, tensor) == tensor, name, "two tensors")
        hosts = [part.fields["host"] for part in self.parts]
        expect(len(set(hosts)) == len(hosts), hosts, "a host twice")
        expected = max(part.fields["about"]["tensors"] for part in self.parts)
        expect(len(self.tensors) == expected, hosts, f"not {expected} tensors")
        self.committed: dict[str, int] = {}
        for part in self.parts:
            stated = part.fields.get("committed", {"fingerprints": {}})["fingerprints"]
            for name, text in stated.items():
                known = self.committed.setdefault(name, int(text, 16))
                expect(known == int(text, 16), hosts, "committed otherwise")

    def pieces(self, name: str) -> list[Piece]:
        """Return the pieces of a tensor, of all parts."""
        return [piece for part in self.parts for piece in part.pieces if piece.tensor == name]

    def bits(self, name: str) -> Array:
        """Return a tensor as unsigned numbers, proven."""
        shape, dtype = self.tensors[name]
        whole: Array = np.zeros(shape, f"<u{ITEM_BYTES[dtype]}")
        filled = np.zeros(shape, bool)
        for piece in self.pieces(name):
            values = read_piece(piece, dtype)
            found = fingerprint(values, piece.offset, shape)
            expect(found == piece.fingerprint, piece.path, f"{name} is not what was written")
            box = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.shape, strict=True))
            expect(bool((whole[box] == values)[filled[box]].all()), name, "pieces differ")
            whole[box], filled[box] = values, True
        expect(bool(filled.all()), name, "not whole")
        total = fingerprint(whole, (0,) * len(shape), shape)
        expect(self.committed.get(name, total) == total, name, "is not what was committed")
        return whole

    def values(self, name: str) -> Array:
        """Return a tensor as numbers; those that numpy lacks as F32."""
        bits, dtype = self.bits(name), self.tensors[name][1]
        if dtype == "BF16":
            return (bits.astype("<u4") << np.uint32(16)).view("<f4")
        if dtype == "F8_E5M2":
            return (bits.astype("<u2") << np.uint16(8)).view("<f2").astype("<f4")
        if dtype == "F8_E4M3":
            return np.vectorize(_e4m3, otypes=["<f4"])(bits)
        kind = {"B": "?", "U": "<u", "I": "<i", "F": "<f"}[dtype[0]]
        return bits.view(kind if dtype == "BOOL" else f"{kind}{ITEM_BYTES[dtype]}")

    @property
    def scalars(self) -> dict[str, Any]:
        return unite([part.fields["scalars"] for part in self.parts])

    @property
    def rank_state(self) -> dict[str, Any]:
        return {k: v for part in reversed(self.parts) for k, v in part.fields["rank_state"].items()}


def _state(part: Part) -> tuple[Any, ...]:
    fields = part.fields
    return fields["generation"], fields["step"], fields["about"].get("snapshot")


def unite(objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Unite objects key by key; of two values the first one counts."""
    united: dict[str, Any] = {}
    for each in objects:
        for key, value in each.items():
            if isinstance(united.get(key), dict) and isinstance(value, dict):
                united[key] = unite([united[key], value])
            else:
                united.setdefault(key, value)
    return united


def read_piece(piece: Piece, dtype: str) -> Array:
    """Return the bits of a piece from its file."""
    size = prod(piece.shape) * ITEM_BYTES[dtype]
    with open(piece.path, "rb") as file:
        file.seek(piece.begin)
        data = file.read(size)
    expect(len(data) == size, piece.path, "ends too early")
    return np.frombuffer(data, f"<u{ITEM_BYTES[dtype]}").reshape(piece.shape)


def _e4m3(bits: int) -> float:
    exponent, mantissa, sign = bits >> 3 & 15, bits & 7, -1.0 if bits & 128 else 1.0
    if bits & 127 == 127:
        return float("nan")
    return float(
        sign * (mantissa / 512 if not exponent else (8 + mantissa) * 2.0 ** (exponent - 10))
    )


def find_durable(folder: Path) -> dict[int, list[Path]]:
    """Return the parts below ``<durable dir>/<job>`` by number."""
    found: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("generation-*/*/manifest.json")):
        if not path.parent.name.startswith("."):
            number = int(path.parents[1].name.removeprefix("generation-"))
            found.setdefault(number, []).append(path.parent)
    return found


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a file begins, and its header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    expect((8 + length) % 64 == 0, path, "header")
    return 8 + length, json.loads(data[8 : 8 + length])


# ------------------------------------------------------------------ fingerprints


def fingerprint(bits: Array, offset: Sequence[int], shape: Sequence[int]) -> int:
    """Return the fingerprint of a piece [...] of unsigned numbers at ``offset`` of a tensor."""
    columns = shape[-1] if shape else 1
    first = offset[-1] if offset else 0
    total = 0
    for index in np.ndindex(bits.shape[:-1]) if bits.size else ():
        row = 0
        for at, start, size in zip(index, offset, shape, strict=False):
            row = row * size + start + at
        values = bits[index].reshape(-1)
        total += _row(values, row, first, columns)
    return total % MODULUS


def _signed(key: bytes) -> int:
    digits = [int.from_bytes(key[at : at + 2], "little", signed=True) for at in (0, 2, 4, 6)]
    return sum(digit << 16 * place for place, digit in enumerate(digits))


MADE = hashlib.shake_256(b"scalai fingerprint, version 2").digest(8 * 129)
START = int.from_bytes(MADE[:8], "little")
B = [_signed(MADE[8 * at : 8 * at + 8]) for at in range(1, 129)]


def _a(number: int) -> int:
    value = (START + number * 0x9E3779B97F4A7C15) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return _signed((value ^ value >> 31).to_bytes(8, "little"))


def _row(values: Array, row: int, first: int, columns: int) -> int:
    item = values.itemsize
    count = -(-columns * item // 4)
    data = bytearray(4 * count)
    data[first * item : first * item + values.nbytes] = values.astype(f"<u{item}").tobytes()
    words = np.frombuffer(bytes(data), "<i4").tolist()
    segments = -(-count // SEGMENT)
    total = 0
    for number in range(segments):
        inside = words[SEGMENT * number : SEGMENT * (number + 1)]
        key = _a((row * segments + number) & MASK)
        total += key * sum(b * word for b, word in zip(B, inside, strict=False))
    return total
