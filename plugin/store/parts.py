"""Values made of a host's part of a generation: its pieces as arrays, its summary, the part with
fetched, removed or attached pieces.

The coordinator and other hosts' plans use summaries. Rows of fetched pieces and states of ranks
grow with the number of hosts: they stay on the host. Fetched pieces outlive their source hosts;
they count as unproven until a proof of the whole state. A part on a disk is attached by links:
nothing is copied.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.core.errors import DamageError, StoreError
from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Collection, Columns, concatenate
from scalai.core.tensors.dtypes import Bits, bits_dtype
from scalai.core.tensors.fingerprint import CommitStatement, piece_fingerprint
from scalai.core.tensors.holders import Pieces, Reference, merged, used_only
from scalai.core.tensors.region import Box
from scalai.store.files import box_view, map_file, slices
from scalai.store.generation import unite_hosts
from scalai.store.manifest import HostManifest, StoredFile, manifest_bytes

ATTACHED = "attached"
"""Key in ``about`` of a manifest: hosts of the attached parts, and their directory."""
FETCHED = "fetched"
"""Mark in the names of files with pieces of other hosts."""


@dataclass(frozen=True, eq=False, slots=True)
class Staged:
    """A file for pieces of other hosts: each lies row-major at its byte of ``begins`` [rows]."""

    path: Path
    pieces: Collection
    begins: Columns

    def fingerprints(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return the fingerprints of these written rows, [rows]."""
        return fingerprints_of(self.path, self.pieces.select(rows), self.begins[rows])


class StoredRows:
    """Read-only views of the pieces of one host's part.

    The constructor maps the part's own files once; ``map_attached`` maps linked ones.
    ``is_examined`` treats an unmappable file as empty.

    Raises:
        DamageError: A file cannot be mapped.
    """

    def __init__(
        self, directory: Path, manifest: HostManifest, *, is_examined: bool = False
    ) -> None:
        self.directory, self.manifest = directory, manifest
        self._is_examined = is_examined
        self._attached: dict[int, Path] = {}
        self.files: list[memoryview] = []
        for number, stored in enumerate(manifest.files):
            path = directory / stored.name
            if path.is_symlink():
                self._attached[number] = Path(os.readlink(path))
                self.files.append(memoryview(b""))
            else:
                self.files.append(self._map(path))

    def map_attached(self) -> None:
        """Map the files on another disk. It may hang: call without a mutex.

        Raises ``DamageError``.
        """
        for number, path in self._attached.items():
            self.files[number] = self._map(path)

    def _map(self, path: Path) -> memoryview:
        try:
            return map_file(path)
        except OSError as error:
            if self._is_examined:
                return memoryview(b"")
            raise DamageError(
                f"{path} cannot be mapped ({error.strerror}). Use another generation."
            ) from error

    def view(self, row: int) -> Bits:
        """Return piece ``row`` as the unsigned bits of its elements [box.shape], without a copy.

        Raises:
            DamageError: Its file is too short.
        """
        tensor, box = self.manifest.collection.box(row)
        data, begin = self.files[self.manifest.file[row]], int(self.manifest.begin[row])
        try:
            return box_view(data, begin, box.shape, bits_dtype(tensor.dtype))
        except ValueError as error:
            raise DamageError(
                f"{self._name(row)} begins at byte {begin} and ends behind the end: the file has "
                f"{len(data)} bytes"
            ) from error

    def _name(self, row: int) -> str:
        tensor, box = self.manifest.collection.box(row)
        path = self.directory / self.manifest.files[self.manifest.file[row]].name
        return f"{tensor.name!r} {list(box.offset)}+{list(box.shape)} in {path.resolve()}"

    def part(self, row: int, part: Box) -> Bits:
        """Return the box ``part`` of piece ``row``, without a copy; offsets are the tensor's.

        Raises:
            StoreError: ``part`` does not lie inside the piece.
        """
        tensor, box = self.manifest.collection.box(row)
        if part.numel and part.intersect(box) != part:
            raise StoreError(
                f"box {list(part.offset)}+{list(part.shape)} of {tensor.name!r} is asked for, but "
                f"the piece is {list(box.offset)}+{list(box.shape)}. Ask for a part of the piece."
            )
        inside = tuple(low - start for low, start in zip(part.offset, box.offset, strict=True))
        return np.asarray(self.view(row)[slices(Box(inside, part.shape))])

    def check(self, row: int) -> None:
        """Compute the fingerprint of piece ``row`` again.

        Raises:
            DamageError: It differs, or the file is too short.
        """
        tensor, box = self.manifest.collection.box(row)
        expected = int(self.manifest.fingerprint[row])
        found = piece_fingerprint(self.view(row), box, tensor.shape)
        if found != expected:
            raise DamageError(
                f"{self._name(row)} has fingerprint {found:016x}, not {expected:016x}"
            )

    def damage(self) -> Iterator[tuple[int, str]]:
        """Compute all fingerprints again; yield row and line of each damaged piece."""
        for row in range(len(self.manifest.collection)):
            try:
                self.check(row)
            except DamageError as error:
                yield row, str(error)


def snapshot_name(part: HostManifest) -> str:
    """Return the common name of one snapshot's parts: coordinator's run, round and step."""
    return str(part.about.get("snapshot", f"generation-{part.generation}"))


def pieces_of(part: HostManifest, rows: int | None = None) -> Pieces:
    """Return the first ``rows`` pieces of a part; None: all."""
    chosen = np.arange(len(part.collection))[:rows]
    return Pieces(
        snapshot_name(part),
        part.step,
        used_only(part.collection.select(chosen)),
        part.fingerprint[chosen],
    )


def reference_of(part: HostManifest) -> Reference:
    """Return the reference of a part's pieces; for a summary, of the summarized part."""
    if part.summarizes is not None:
        return part.summarizes
    return Reference(len(part.collection), pieces_of(part).digest().hex())


def summary_bytes(part: HostManifest) -> bytes:
    """Return the summary of a part for sending."""
    return manifest_bytes(summary(part))


def summary(part: HostManifest) -> HostManifest:
    """Return a part with only the coordinates of its ranks' states.

    A committed part with all its tensors' fingerprints stated also has fewer rows (the same
    elements) and no fingerprints of rows.
    """
    states = dict.fromkeys(part.rank_state)
    short = replace(part, rank_state=states, summarizes=reference_of(part))
    stated = part.committed.fingerprints if part.committed is not None else {}
    if any(tensor.numel and tensor.name not in stated for tensor in part.collection.tensors):
        return short
    is_unproven = np.isin(part.file, part.unproven)
    groups: list[Collection] = []
    for chosen in (~is_unproven, is_unproven):
        groups.append(merged(part.collection.select(np.flatnonzero(chosen))))
    rows = concatenate(groups)
    counts = [len(group) for group in groups]
    files = tuple(
        StoredFile(name, int(group.size_bytes().sum()))
        for name, group in zip(("proven", "unproven"), groups, strict=True)
    )
    return replace(
        short,
        collection=rows,
        file=np.repeat(np.arange(2), counts).astype(np.int64),
        begin=np.zeros(len(rows), dtype=np.int64),
        fingerprint=np.zeros(len(rows), dtype=np.uint64),
        files=files,
        unproven=(1,) if counts[1] else (),
    )


def fingerprints_of(path: Path, pieces: Collection, begins: Columns) -> npt.NDArray[np.uint64]:
    """Return the fingerprint of each piece [rows], stored row-major in a file at byte ``begins``
    [rows].
    """
    data, values = map_file(path), []
    for row, begin in enumerate(begins.tolist()):
        tensor, box = pieces.box(row)
        bits = box_view(data, begin, box.shape, bits_dtype(tensor.dtype))
        values.append(piece_fingerprint(bits, box, tensor.shape))
    return np.array(values, dtype=np.uint64)


def piece_keys(collection: Collection) -> list[tuple[str, bytes, bytes]]:
    """Return the identity of each piece in a state: tensor and box, [rows]."""
    names = [collection.tensors[number].name for number in collection.tensor.tolist()]
    boxes = zip(collection.offset, collection.shape, strict=True)
    return [
        (name, offset.tobytes(), shape.tobytes())
        for name, (offset, shape) in zip(names, boxes, strict=True)
    ]


def unchanged(
    manifest: HostManifest, pieces: Collection, stated: Mapping[int, int]
) -> dict[int, int]:
    """Return the manifest's row of each piece with an equal box, tensor and ``stated`` fingerprint,
    by the piece's row.

    Pieces without such a row are left out.
    """
    if not np.isin(np.array([*stated.values()], np.uint64), manifest.fingerprint).any():
        return {}
    held = {
        (*key, value): row
        for row, (key, value) in enumerate(
            zip(piece_keys(manifest.collection), manifest.fingerprint.tolist(), strict=True)
        )
    }
    found = {}
    for row, key in enumerate(piece_keys(pieces)):
        source = held.get((*key, stated[row])) if row in stated else None
        if source is None:
            continue
        number = int(manifest.collection.tensor[source])
        if manifest.collection.tensors[number] == pieces.tensors[int(pieces.tensor[row])]:
            found[row] = source
    return found


@dataclass(frozen=True, eq=False, slots=True)
class Extras:
    """Values beside fetched pieces: scalars of all hosts, ``rank_state`` by coordinate of the
    ``ranks`` on this host, and the coordinator's statement.
    """

    scalars: Mapping[str, Json]
    rank_state: Mapping[str, Json]
    ranks: tuple[int, ...]
    committed: CommitStatement | None


def empty_part(like: HostManifest, host: str) -> HostManifest:
    """Return a part of the same generation for a host without pieces."""
    none = np.zeros(0, dtype=np.int64)
    return replace(
        like,
        host=host,
        about={key: value for key, value in like.about.items() if key != ATTACHED},
        ranks=(),
        collection=like.collection.select(none),
        file=none,
        begin=none,
        fingerprint=like.fingerprint[:0],
        files=(),
        rank_state={},
        unproven=(),
    )


def extended(
    own: HostManifest,
    file: StoredFile,
    pieces: Collection,
    begins: Columns,
    fingerprints: npt.NDArray[np.uint64],
    extras: Extras | None = None,
) -> HostManifest:
    """Return ``own`` with one more file of pieces behind its own, and their ``extras``."""
    grown = replace(
        own,
        collection=concatenate([own.collection, used_only(pieces)]),
        file=np.concatenate([own.file, np.full(len(pieces), len(own.files), dtype=np.int64)]),
        begin=np.concatenate([own.begin, begins]),
        fingerprint=np.concatenate([own.fingerprint, fingerprints]),
        files=(*own.files, file),
        unproven=(*own.unproven, len(own.files)),
    )
    if extras is None:
        return grown
    stated = own.committed
    return replace(
        grown,
        scalars=extras.scalars,
        rank_state={**own.rank_state, **extras.rank_state},
        ranks=tuple(sorted({*own.ranks, *extras.ranks})),
        committed=extras.committed if stated is None else stated.united(extras.committed),
    )


def is_fetched(file: StoredFile) -> bool:
    """Return True for a file of ``HeldGenerations.stage``: its pieces came from other hosts."""
    return f"{FETCHED}-" in file.name


def attached_hosts(part: HostManifest) -> list[str]:
    """Return the source hosts of this part's attached pieces."""
    return [str(host) for host in part.about.get(ATTACHED, {}).get("hosts", ())]


def proven_only(own: HostManifest) -> HostManifest:
    """Return ``own`` without unproven files and their pieces."""
    return with_files(own, [n for n in range(len(own.files)) if n not in own.unproven])


def without_rows(own: HostManifest, rows: Iterable[int]) -> HostManifest:
    """Return ``own`` without these of its pieces; its files stay."""
    left = np.setdiff1d(np.arange(len(own.collection)), list(rows))
    return replace(
        own,
        collection=own.collection.select(left),
        file=own.file[left],
        begin=own.begin[left],
        fingerprint=own.fingerprint[left],
    )


def with_files(own: HostManifest, kept: Sequence[int]) -> HostManifest:
    """Return ``own`` with these files and their pieces only."""
    place = np.full(len(own.files), -1, dtype=np.int64)
    place[list(kept)] = np.arange(len(kept))
    rows = np.flatnonzero(place[own.file] >= 0) if len(own.file) else own.file
    return replace(
        own,
        collection=own.collection.select(rows),
        file=place[own.file[rows]],
        begin=own.begin[rows],
        fingerprint=own.fingerprint[rows],
        files=tuple(own.files[number] for number in kept),
        unproven=tuple(int(place[number]) for number in own.unproven if place[number] >= 0),
    )


@dataclass(frozen=True, eq=False, slots=True)
class Attachment:
    """A host's part with attached pieces: its manifest, and the target of each link by name."""

    manifest: HostManifest
    links: dict[str, Path]


def attachment(
    host: str, parts: Sequence[tuple[Path, HostManifest]], own: HostManifest | None
) -> Attachment:
    """Return ``host``'s part of a generation with all its missing pieces of ``parts``.

    Args:
        parts: Directory, without links in its path, and manifest of parts of one generation.
        own: The host's present part, or None.

    Raises:
        StoreError: They are not parts of one generation, or ``own`` is another state under its
            number. LayoutError: Their tensors differ.
    """
    generation = unite_hosts([part for _, part in parts], [path for path, _ in parts])
    first = generation.hosts[0]
    for part in (*generation.hosts, *(() if own is None else (own,))):
        if _state(part) != _state(first):
            raise StoreError(
                f"{parts[0][0].parent} and host {part.host!r} have different states under the "
                f"number {first.generation}: {first.about.get('snapshot')!r} of step {first.step} "
                f"and {part.about.get('snapshot')!r} of step {part.step}. Move one of them away."
            )
    grown = empty_part(first, host) if own is None else own
    held = set(piece_keys(grown.collection))
    links: dict[str, Path] = {}
    for part, directory in zip(generation.hosts, generation.directories, strict=True):
        assert directory is not None
        rows = []
        for row, key in enumerate(piece_keys(part.collection)):
            if key not in held:
                held.add(key)
                rows.append(row)
        if rows:
            grown = _with_rows(grown, part, np.array(rows, dtype=np.int64), directory, links)
    is_first = own is None
    whole = replace(generation, hosts=(*([] if is_first else [grown]), *generation.hosts))
    about = {
        **grown.about,
        ATTACHED: {
            "hosts": sorted({*attached_hosts(grown), *(part.host for part in generation.hosts)}),
            "directory": str(parts[0][0].parent),
        },
    }
    manifest = replace(
        grown,
        about=about,
        ranks=tuple(sorted({*grown.ranks, *(r for part in generation.hosts for r in part.ranks)})),
        scalars=whole.scalars,
        rank_state=whole.rank_state,
    )
    return Attachment(manifest, links)


def _state(part: HostManifest) -> tuple[object, int]:
    return part.about.get("snapshot"), part.step


def _with_rows(
    own: HostManifest, part: HostManifest, rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    directory: Path, links: dict[str, Path],
) -> HostManifest:  # fmt: skip
    """Return ``own`` with rows of a part; add the links to their files to ``links``."""
    used, places = np.unique(part.file[rows], return_inverse=True)
    files: list[StoredFile] = []
    for number in used.tolist():
        stored = part.files[number]
        taken = {file.name for file in (*own.files, *files)}
        place = len(taken)
        while (name := f"{place}-{stored.name}") in taken:
            place += 1  # files in between have gone
        links[name] = directory / stored.name
        files.append(StoredFile(name, stored.size_bytes))
    return replace(
        own,
        collection=concatenate([own.collection, part.collection.select(rows)]),
        file=np.concatenate([own.file, places + len(own.files)]),
        begin=np.concatenate([own.begin, part.begin[rows]]),
        fingerprint=np.concatenate([own.fingerprint, part.fingerprint[rows]]),
        files=(*own.files, *files),
        committed=part.committed if own.committed is None else own.committed.united(part.committed),
        unproven=(
            *own.unproven,
            *(len(own.files) + at for at, n in enumerate(used.tolist()) if n in part.unproven),
        ),
    )
