"""Files of a target that hold no tensors: copied, brought to disk, read back; checked later.

Their digests are kept in the proof that a conversion leaves, under ``beside``.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import REPORT, AuxiliaryFile, Checkpoint, Target
from scalai.converters.opening import read_json
from scalai.converters.torch_archive import check_members
from scalai.core.errors import ProofError, RefusedError
from scalai.store.atomic import sync_directory

AUXILIARY = "beside"
"""The digests' key in the proof."""
BLOCK_BYTES = 4 << 20


def auxiliary_bytes(target: Target) -> int:
    """Return how much room a target's files without tensors take."""
    return sum(file.size_bytes for file in target.auxiliary)


def identify(file: AuxiliaryFile) -> bytes:
    """Return what changes whenever a file's content is to be another."""
    if file.source is None:
        return repr(file.path).encode() + (file.content or b"")
    stat = file.source.stat()
    return repr((file.path, str(file.source), stat.st_size, stat.st_mtime_ns)).encode()


def write_auxiliary(directory: Path, target: Target) -> dict[str, str]:
    """Write a target's files without tensors.

    Returns:
        Their SHA-256 by path.

    Raises:
        ProofError: What was read back is not what was written.
        RefusedError: One of torch's files is not what its checksums were taken of.
    """
    digests = {file.path: _write(directory / file.path, file) for file in target.auxiliary}
    for folder in sorted({(directory / path).parent for path in digests}):
        sync_directory(folder)
    return digests


def _write(path: Path, file: AuxiliaryFile) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with open(path, "wb") as target:
        for block in _blocks(file):
            digest.update(block)
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
    if _digest(path) != digest.hexdigest():
        raise ProofError(
            f"{path} is not what was written to it. The disk or the memory is not sound: check "
            "them and run again."
        )
    return digest.hexdigest()


def _blocks(file: AuxiliaryFile) -> Iterator[bytes]:
    if file.source is None:
        yield file.content or b""
        return
    with open(file.source, "rb") as source:
        check_members(source, str(file.source))
        source.seek(0)
        while block := source.read(BLOCK_BYTES):
            yield block


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_auxiliary(checkpoint: Checkpoint) -> None:
    """Compare the files without tensors with the digests that a conversion left.

    Raises:
        ProofError: They differ, or are missing; names them.
        RefusedError: The proof is damaged.
    """
    for folder in (checkpoint.directory, *checkpoint.directory.parents[:2]):
        recorded = _recorded(folder / REPORT)
        wrong = [
            path
            for path, digest in sorted(recorded.items())
            if not (folder / path).is_file() or _digest(folder / path) != digest
        ]
        if wrong:
            raise ProofError(
                f"{len(wrong)} files beside the tensors are missing or not what {folder / REPORT} "
                f"says was written: {', '.join(wrong[:5])}. They were changed since."
            )


def _recorded(path: Path) -> Mapping[str, str]:
    if not path.is_file():
        return {}
    report: Any = read_json(path)
    recorded = report.get(AUXILIARY, {}) if isinstance(report, dict) else None
    if not isinstance(recorded, dict) or not all(
        isinstance(text, str) and ".." not in Path(text).parts for text in recorded
    ):
        raise RefusedError(f"{path} is damaged. Remove it, or convert again.")
    return recorded
