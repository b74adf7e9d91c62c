"""The manifest of a host's part of a generation: place of each box, step, fingerprints.

``manifest.json`` lies beside the files. It carries its own digest, so that damage is found before
any of its numbers is used.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.core import fields
from scalai.core.errors import StoreError
from scalai.core.jsonable import Json, parse_json
from scalai.core.tensors.boxes import outside, right_aligned
from scalai.core.tensors.collection import MAX_NDIM, Collection, Columns, Tensor
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.fingerprint import VERSION as FINGERPRINT_VERSION
from scalai.core.tensors.fingerprint import CommitStatement
from scalai.core.tensors.holders import Reference
from scalai.core.tensors.universal_hash import P
from scalai.store.atomic import partial_of, replace_file
from scalai.store.places import MANIFEST

FORMAT = "scalai-generation"
VERSION = 3
UNNUMBERED = -1
"""The generation of a sealed, uncommitted manifest."""
MAX_BYTES = 1 << 60
"""Largest tensor, empty dims counted as one: more than any disk holds, and sums of places stay
below 2^63."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a host's part: its name inside the directory and its exact size."""

    name: str
    size_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class HostManifest:
    """One host's part of one generation.

    ``collection`` has a row for each stored piece; ``file`` [rows] indexes ``files``, ``begin``
    [rows] is the absolute byte offset, ``fingerprint`` [rows] the content. ``about`` describes the
    state's origin (consumed_samples, degrees, world_size, framework, versions, time). ``ranks``
    wrote here. ``scalars`` are united over those ranks; ``rank_state`` has an entry for each
    coordinate. ``committed`` is the coordinator's statement about the whole generation, None before
    it. ``unproven`` indexes fetched files without a proof. ``summarizes`` refers to the pieces of
    the summarized part (``parts.summary``); None: this is no summary.
    """

    generation: int
    step: int
    host: str
    about: Mapping[str, Json]
    ranks: tuple[int, ...]
    collection: Collection
    file: Columns
    begin: Columns
    fingerprint: npt.NDArray[np.uint64]
    files: tuple[StoredFile, ...]
    scalars: Mapping[str, Json]
    rank_state: Mapping[str, Json]
    committed: CommitStatement | None = None
    unproven: tuple[int, ...] = ()
    summarizes: Reference | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all stored pieces, without headers."""
        return int(self.collection.size_bytes().sum())

    def to_json(self) -> dict[str, Json]:
        """Return plain values for ``json``; ``from_json`` reads them back."""
        stated: dict[str, Json] = {}
        if self.committed is not None:
            stated["committed"] = self.committed.to_json()
        if self.summarizes is not None:
            stated["summarizes"] = [self.summarizes.rows, self.summarizes.digest]
        return {
            "format": FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "step": self.step,
            "host": self.host,
            "about": dict(self.about),
            "ranks": list(self.ranks),
            "files": [[f.name, f.size_bytes] for f in self.files],
            "scalars": dict(self.scalars),
            "rank_state": dict(self.rank_state),
            "collection": self.collection.to_json(),
            "file": self.file.tolist(),
            "begin": self.begin.tolist(),
            "fingerprint_version": FINGERPRINT_VERSION,
            # Text: readers with numbers as doubles would round them.
            "fingerprint": [f"{value:016x}" for value in self.fingerprint.tolist()],
            **stated,
            **({"unproven": list(self.unproven)} if self.unproven else {}),
        }

    def digest(self) -> str:
        """Return the SHA-256 of the content, in hex: two equal digests are equal manifests."""
        return fields.digest_of(self.to_json())

    @classmethod
    def from_json(cls, data: Mapping[str, Json], where: str) -> "HostManifest":
        """Read the values of ``to_json``.

        Raises:
            StoreError: A value is missing, of the wrong kind or inconsistent; names ``where``.
        """
        try:
            manifest = _read(data, where)
            problem = find_inconsistency(manifest)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            if isinstance(error, StoreError):
                raise
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise StoreError(
                f"{where} is damaged: {what}. Remove its directory and use another generation."
            ) from error
        if problem:
            raise StoreError(
                f"{where} is damaged: {problem}. Remove its directory and use another generation."
            )
        return manifest


def _read(data: Mapping[str, Json], where: str) -> HostManifest:
    _check_versions(data, where)
    files = [fields.listed(entry, "an entry of files") for entry in data["files"]]
    return HostManifest(
        generation=fields.whole_number(data["generation"], "generation", UNNUMBERED),
        step=fields.whole_number(data["step"], "step"),
        host=fields.file_name(data["host"], "host"),
        about=fields.about(data["about"]),
        ranks=tuple(fields.column(data["ranks"], "ranks").tolist()),
        collection=fields.collection(data["collection"]),
        file=fields.column(data["file"], "file"),
        begin=fields.column(data["begin"], "begin"),
        fingerprint=fields.fingerprints(data["fingerprint"], "fingerprint"),
        files=tuple(
            StoredFile(
                fields.file_name(name, "files"), fields.whole_number(size, f"bytes of {name}")
            )
            for name, size in files
        ),
        scalars=fields.mapped(data["scalars"], "scalars"),
        rank_state=fields.mapped(data["rank_state"], "rank_state"),
        committed=CommitStatement.from_json(data["committed"]) if "committed" in data else None,
        unproven=tuple(fields.column(data.get("unproven", []), "unproven").tolist()),
        summarizes=_reference(data["summarizes"]) if "summarizes" in data else None,
    )


def _reference(value: Json) -> Reference:
    rows, digest = fields.listed(value, "summarizes")
    return Reference(
        fields.whole_number(rows, "rows of summarizes"),
        fields.digest(digest, "digest of summarizes"),
    )


def _check_versions(data: Mapping[str, Json], where: str) -> None:
    version = data["version"]
    if (data["format"], version) != (FORMAT, VERSION) or type(version) is not int:
        raise StoreError(
            f"{where} is {data['format']!r} version {version!r}; this release reads {FORMAT!r} "
            f"version {VERSION}. Use the release that wrote it."
        )
    prints = data["fingerprint_version"]
    if prints != FINGERPRINT_VERSION or type(prints) is not int:
        raise StoreError(
            f"{where} has fingerprints of version {prints!r}; this release knows those of version "
            f"{FINGERPRINT_VERSION}. Use the release that wrote it."
        )


def write_manifest(directory: Path, manifest: HostManifest) -> None:
    """Write ``manifest.json`` of a host's part durably.

    Uses the room of ``reserve_manifests``, if any. If it is too small and there is no other
    (``OSError``), it stays for another try.
    """
    aside = partial_of(directory / MANIFEST)
    if not aside.exists():
        for spare in sorted(directory.glob(_SPARE))[:1]:
            os.rename(spare, aside)
    replace_file(directory / MANIFEST, manifest_bytes(manifest), mode=0o600)


_SPARE = f".{MANIFEST}.spare-*"


def reserve_manifests(directory: Path, size_bytes: int) -> None:
    """Reserve room for the manifests of a snapshot's seal and commit, in case the file system fills
    up meanwhile.

    Raises:
        StoreError: There is no room.
    """
    for number in range(2):
        path = directory / _SPARE.replace("*", str(number))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            raise StoreError(
                f"{path} needs {size_bytes} bytes, but {error.strerror}. Enlarge the shared memory "
                "(--shm-size of docker run) or choose another --store-dir."
            ) from error
        finally:
            os.close(descriptor)


def is_spare(path: Path) -> bool:
    """Return True for a file of ``reserve_manifests``."""
    return path.match(_SPARE)


def release_manifests(directory: Path) -> None:
    """Give the unused room back."""
    for spare in directory.glob(_SPARE):
        spare.unlink()


def read_manifest(directory: Path) -> HostManifest:
    """Read and check the manifest of a host's part and the sizes of its files.

    Raises:
        StoreError: There is none, it is damaged, or a file is missing or has another size; names
            the file.
    """
    path = directory / MANIFEST
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read ({error.strerror}); a committed generation has one. Name a "
            "generation's directory."
        ) from error
    except ValueError as error:
        raise StoreError(
            f"{path} is damaged ({error}). Remove its directory and use another generation."
        ) from error
    manifest = _manifest_with_digest(data, str(path))
    for stored in manifest.files:
        file = directory / stored.name
        size = file.stat().st_size if file.is_file() else None
        if size != stored.size_bytes:
            found = "missing" if size is None else f"{size} bytes long"
            raise StoreError(
                f"{file} is {found}; {path} promises {stored.size_bytes} bytes. Remove the "
                "directory and use another generation."
            )
    return manifest


def read_own_manifest(directory: Path, host: str, generation: int | None = None) -> HostManifest:
    """Read the manifest in a host's folder of this generation; None: of a sealed snapshot.

    Raises:
        StoreError: It is damaged, or of another host or generation: somebody has moved it there.
    """
    manifest = read_manifest(directory)
    is_other = generation not in (None, manifest.generation)
    if manifest.host != host or is_other:
        there = "a snapshot" if generation is None else f"generation {generation}"
        raise StoreError(
            f"{directory} holds generation {manifest.generation} of host {manifest.host!r}, and "
            f"lies where {there} of host {host!r} belongs: was a folder renamed, or has this host "
            f"another name than before? Give it that one (--host-id {manifest.host}), rename the "
            "folder back, or give the state up by scalai clean."
        )
    return manifest


NEEDED = ("consumed_samples", "degrees", "tensors", "world_size")
"""Keys of a saved part's ``about``: needed to check completeness and to continue from the state."""


def read_saved_manifest(directory: Path, generation: int | None = None) -> HostManifest:
    """Read the manifest of any job's saved part, in a folder of this generation (None: of any).

    Raises:
        StoreError: It is damaged, of another generation, or lacks a key of ``NEEDED``.
    """
    manifest = read_manifest(directory)
    if generation not in (None, manifest.generation):
        raise StoreError(
            f"{directory} says that it is generation {manifest.generation}, and lies where "
            f"generation {generation} belongs: was a folder renamed? Rename it back."
        )
    missing = [name for name in NEEDED if name not in manifest.about]
    if missing:
        raise StoreError(
            f"{directory / MANIFEST} is damaged: about says no {', '.join(missing)}. Remove its "
            "directory and use another generation."
        )
    return manifest


def manifest_of_bytes(data: bytes, where: str) -> HostManifest:
    """Read the bytes of ``manifest_bytes`` from a sealed connection.

    The connection vouches for every byte. So the digest is not computed again: it would take as
    long as all the rest. Raises ``StoreError`` naming ``where``.
    """
    try:
        content = _object(parse_json(data), where)
    except ValueError as error:
        raise StoreError(f"{where} is damaged ({error}). Use another generation.") from error
    return HostManifest.from_json(content, where)


def _object(data: Json, where: str) -> dict[str, Json]:
    if not isinstance(data, dict):
        raise StoreError(f"{where} is damaged: not a JSON object. Use another generation.")
    return data


def _manifest_with_digest(data: Json, where: str) -> HostManifest:
    content = {key: value for key, value in _object(data, where).items() if key != "digest"}
    manifest = HostManifest.from_json(content, where)
    if data.get("digest") != fields.digest_of(content):
        raise StoreError(
            f"{where} is damaged: its digest is {data.get('digest')!r}, its content's is "
            f"{fields.digest_of(content)!r}. Remove its directory and use another generation."
        )
    return manifest


def manifest_bytes(manifest: HostManifest) -> bytes:
    """Return a manifest with its digest, as JSON: the content of its file."""
    content = manifest.to_json()
    return json.dumps(
        {"digest": fields.digest_of(content), **content}, separators=(",", ":")
    ).encode()


def find_inconsistency(manifest: HostManifest) -> str | None:
    """Return the first inconsistency of a manifest, or None. Reads no files."""
    rows, collection = len(manifest.collection), manifest.collection
    for name in ("file", "begin", "fingerprint"):
        if len(getattr(manifest, name)) != rows:
            return f"{len(getattr(manifest, name))} values of {name} for {rows} pieces"
    for what, names in (
        ("file", [stored.name for stored in manifest.files]),
        ("tensor", [tensor.name for tensor in collection.tensors]),
        ("rank", list(manifest.ranks)),
    ):
        if len(set(names)) != len(names):
            twice = next(name for number, name in enumerate(names) if name in names[:number])
            return f"{what} {twice!r} is named twice"
    if any(not 0 <= number < len(manifest.files) for number in manifest.unproven):
        return f"files {list(manifest.unproven)} are unproven, but there are {len(manifest.files)}"
    unfit = next(filter(None, map(_unfit, collection.tensors)), None)
    return unfit or (_misplaced(manifest) if rows else None)


def _unfit(tensor: Tensor) -> str | None:
    found = f"tensor {tensor.name!r} is {tensor.dtype}{list(tensor.shape)}"
    if not tensor.is_possible:
        return found
    if prod(max(size, 1) for size in tensor.shape) * ITEM_BYTES[tensor.dtype] > MAX_BYTES:
        return f"{found}, more than any disk holds"
    return None


def _misplaced(manifest: HostManifest) -> str | None:
    collection = manifest.collection
    ndim = np.array([len(tensor.shape) for tensor in collection.tensors], dtype=np.int64)
    is_filled_up = np.arange(MAX_NDIM) < (MAX_NDIM - ndim)[collection.tensor, None]
    full = right_aligned(collection.tensors)
    wrong = outside(full, collection.tensor, collection.offset, collection.shape).tolist()
    wrong += np.flatnonzero((is_filled_up & (collection.shape != 1)).any(axis=1)).tolist()
    if wrong:
        tensor = collection.tensors[collection.tensor[wrong[0]]]
        return f"piece {wrong[0]} lies outside tensor {tensor.name!r}"
    unknown = manifest.file[(manifest.file < 0) | (manifest.file >= len(manifest.files))]
    if len(unknown):
        return f"a piece lies in file {unknown[0]}, but there are {len(manifest.files)}"
    sizes = np.array([stored.size_bytes for stored in manifest.files], dtype=np.int64)
    beyond = manifest.begin > sizes[manifest.file] - collection.size_bytes()
    beyond |= manifest.begin < 0
    if beyond.any():
        row = int(beyond.argmax())
        return f"piece {row} ends beyond {manifest.files[manifest.file[row]].name}"
    largest = int(manifest.fingerprint.max())
    return None if largest < P else f"fingerprint {largest:016x} is not below {P:x}"
