"""How to damage a checkpoint: files of torch's format are taken apart and put together again."""

import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalai.converters import pickles
from scalai.converters.dcp_metadata import StoredKey, read_metadata, write_metadata
from scalai.converters.pickles import foreign
from scalai.converters.torch_archive import content_of, lay_out_archive, read_archive, with_content
from scalai.store.files import map_file

Damage = Callable[[Path], object]


def change_tree(path: Path, change: Callable[[Any], Any]) -> None:
    """Write one of torch's files again with another tree; tensors keep their bytes."""
    tree = with_content(read_archive(path), map_file(path))
    path.write_bytes(content_of(lay_out_archive(change(tree))))


def merge(path: Path, entries: Mapping[str, Any]) -> None:
    """Give entries of the dictionary in one of torch's files other values."""
    change_tree(path, lambda tree: {**tree, **entries})


def rewrite_zip(
    path: Path, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED
) -> None:
    """Write one of torch's files again with other members."""
    members = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                member._expected_crc = None  # type: ignore[attr-defined]  # we write none
                members[name] = member.read()
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, change(name, data))


def compress(path: Path) -> None:
    rewrite_zip(path, lambda _, data: data, zipfile.ZIP_DEFLATED)


def age(path: Path) -> None:
    """Make one of torch's files of a later version."""
    rewrite_zip(path, lambda name, data: b"99\n" if name.endswith("/version") else data)


def make_complex(path: Path) -> None:
    """Give the storages of one of torch's files a dtype that is not known."""
    rewrite_zip(path, lambda _, data: data.replace(b"FloatStorage", b"ComplexFloatStorage"))


def plant(path: Path) -> None:
    """Put a pickle that runs a command in the place of one of torch's files."""
    with zipfile.ZipFile(path, "w") as archive:
        pickle = b"cos\nsystem\n(S'touch /tmp/this-must-not-be'\ntR."
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/version", "3\n")


@dataclass(frozen=True)
class View:
    """A tensor that claims a shape and strides of a storage of four fp32 numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


def write_view(path: Path, tree: Any) -> None:
    """Write a file in which ``View`` is a tensor."""

    def reduce(value: Any) -> Any:
        if not isinstance(value, View):
            return None
        rebuild = foreign("torch._utils", "_rebuild_tensor_v2")
        return rebuild, (_Storage(), 0, value.shape, value.stride, False, OrderedDict())

    def persistent(value: Any) -> Any:
        storage = "storage", foreign("torch", "FloatStorage"), "0", "cpu", 4
        return storage if isinstance(value, _Storage) else None

    with zipfile.ZipFile(path, "w") as archive:
        data = pickles.dumps(tree, reduce=reduce, persistent=persistent)
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/version", "3\n")


class _Storage:
    pass


def link_outside(path: Path) -> None:
    """Move a file out of the checkpoint, and leave a link to it."""
    here = next(parent for parent in path.parents if parent.name == "here")
    elsewhere = here.parent / f"elsewhere-{path.name}"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def change_key(directory: Path, key: str, change: Callable[[StoredKey], StoredKey]) -> None:
    """Write ``.metadata`` again with another entry of a key."""
    metadata = read_metadata(directory)
    tensors = [change(tensor) if tensor.key == key else tensor for tensor in metadata.tensors]
    data = write_metadata(tensors, metadata.objects, metadata.paths or None)
    (directory / ".metadata").write_bytes(data)


def change_chunks(directory: Path, key: str, *changes: Mapping[str, Any]) -> None:
    """Write ``.metadata`` again with other first chunks of a key."""

    def change(tensor: StoredKey) -> StoredKey:
        changed = (replace(c, **new) for c, new in zip(tensor.chunks, changes, strict=False))
        return replace(tensor, chunks=(*changed, *tensor.chunks[len(changes) :]))

    change_key(directory, key, change)
