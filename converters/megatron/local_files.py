"""Megatron's local checkpoints (``--non-persistent-ckpt-type local``, of nvidia-resiliency-ext): a
file a rank, read as one ``torch_dist`` checkpoint.

    <local dir>/[<session>/]<rank>/iter_0000010_<rank>_local.pt        of every host, below one path

With replication a rank's folder has files of other ranks too. A file is a tree of ``ShardedTensor``
and ``ShardedObject`` entries, which state what ``.metadata`` does (key, global shape, offset), and
the state that all ranks have in common. Of the replicas of a shard in one data-parallel group, one
rank has the elements (``--non-persistent-local-ckpt-algo fully_parallel``), or each (``atomic``).

Source: ``LocalCheckpointManager`` of nvidia_resiliency_ext/checkpointing/local (0.4.1);
tensor_aware_state_dict.py and mapping.py of megatron/core/dist_checkpointing (0.16.1, 0.19.0).
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import index
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import Checkpoint, CheckpointTarget, ReadOptions, WriteOptions
from scalai.converters.dcp_files import StoredArchives
from scalai.converters.dcp_metadata import (
    Chunk,
    Extent,
    Metadata,
    StoredKey,
    check_box,
    check_held,
    check_objects,
    check_shape,
    sizes_of,
)
from scalai.converters.megatron.beside_tensors import argument_degrees, counters_of
from scalai.converters.megatron.common_state import COMMON_FILE, Common
from scalai.converters.megatron.dp_reshardable import is_bucket
from scalai.converters.megatron.iteration_files import with_run_state
from scalai.converters.megatron.torch_dist import TorchDistReader
from scalai.converters.opening import MAX_PIECES, file_inside
from scalai.converters.pickles import Foreign
from scalai.converters.torch_archive import (
    MAX_VALUE_BYTES,
    StoredTensor,
    content_of,
    lay_out_archive,
    read_archive,
    with_content,
)
from scalai.converters.wrappers import DEPTH
from scalai.core.errors import RefusedError, UsageError
from scalai.core.tensors.dtypes import FROM_TORCH, ITEM_BYTES
from scalai.core.tensors.region import Box, Index, row_major
from scalai.store.files import map_file

NAME = "megatron_local"
_FILE = re.compile(r"iter_(\d{7,18})_(\d{1,9})_local(\.dirty)?\.pt")
_DEPTH = DEPTH + 1
"""Levels of folders below a path: of hosts to that of a session, and ranks."""
MAX_FOLDERS = 1 << 16
MAX_RANKS = 1 << 20
FOUND_BY = 16
"""Ranks' folders looked into to recognise the layout."""

_ROOT = "MCoreTensorAwareStateDict"
_BRIDGE_STATE = "train_state_metadata"
"""Megatron-Bridge's counters, in the common state."""
_BRING = (
    "Bring the folders of the other hosts, or replicas of these files, below this path, or use the "
    "newest global checkpoint."
)


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """The layout ``megatron_local``: read alone."""

    name: str = NAME
    framework: str = "megatron"

    def find(self, path: Path) -> bool:
        """Whether there is a rank's file here, or in one of the first ranks' folders."""
        return any(True for _ in _files_below(path, FOUND_BY, of_ranks=True))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of the newest iteration of which all ranks' files are there."""
        found = _FoundFiles.below(path)
        ranks, notes = found.newest_whole(options.iteration, trust=options.trust_pickle)
        return _read(path, ranks, notes, trust=options.trust_pickle)

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        raise UsageError(f"{NAME} is read, and not written. Use --to torch_dist.")


@dataclass(frozen=True, slots=True)
class _RankFile:
    """The content of one rank's file; ``tensors`` and ``objects`` are fields of the entries.
    ``copies``: paths of its replicas."""

    path: str
    rank: int
    common: Mapping[str, Any]
    tensors: tuple[Mapping[str, Any], ...]
    objects: tuple[Mapping[str, Any], ...]
    copies: tuple[str, ...] = ()

    @property
    def arguments(self) -> Mapping[str, Any]:
        return vars(self.common["args"]) if "args" in self.common else {}

    def facts(self) -> dict[str, Any]:
        """Return plain values that are equal in all files of one save; trees may take for ever to
        compare."""
        known, schedule = self.arguments, self.common.get("opt_param_scheduler")
        found = {
            **argument_degrees(known),
            **counters_of(known),
            "seed": known.get("seed"),
            "world_size": known.get("world_size"),
            **(schedule if isinstance(schedule, dict) else {}),
        }
        return {key: value for key, value in found.items() if isinstance(value, str | int | float)}

    def checksums(self) -> dict[tuple[str, Index], int]:
        """Return the CRC-32 of tensors that fill their storages, by key and offset."""
        return {
            (str(entry["key"]), sizes_of(entry["global_offset"])): data.storage.crc
            for entry in self.tensors
            if isinstance(data := entry["data"], StoredTensor)
            and data.storage is not None
            and data.storage.crc
            and data.stride == row_major(data.shape)
            and data.storage.size_bytes == prod(data.shape) * ITEM_BYTES[data.dtype]
        }


@dataclass(frozen=True, slots=True)
class _FoundFiles:
    """Files by iteration and rank, several of a rank where there are replicas."""

    path: Path
    files: Mapping[int, Mapping[int, Sequence[str]]]
    dirty: Sequence[str]

    @classmethod
    def below(cls, path: Path) -> "_FoundFiles":
        files: dict[int, dict[int, list[str]]] = {}
        dirty: list[str] = []
        for name, match in _files_below(path, MAX_FOLDERS):
            if match[3]:
                dirty.append(name)
            else:
                files.setdefault(int(match[1]), {}).setdefault(int(match[2]), []).append(name)
        return cls(path, files, dirty)

    def newest_whole(
        self, wanted: int | None, *, trust: bool
    ) -> tuple[Mapping[int, _RankFile], list[str]]:
        """Return the files, by rank, of the newest iteration that all ranks have, or of the one
        wanted; and a note for each file and each newer iteration passed over.

        Raises:
            RefusedError: No iteration has all ranks; names the missing ones of each.
        """
        lacking: list[str] = []
        for iteration in sorted(self.files, reverse=True) if wanted is None else [wanted]:
            faults: list[str] = []
            by_rank = self.files.get(iteration, {})
            ranks = {
                rank: file
                for rank, names in sorted(by_rank.items())
                if (file := self._first_whole(iteration, rank, names, faults, trust)) is not None
            }
            _check_facts(self.path, iteration, list(ranks.values()))
            world = self._world(ranks.values())
            if (highest := max(by_rank, default=0)) >= world:
                raise RefusedError(
                    f"{self.path} has a file of rank {highest} at iteration {iteration}, and the "
                    f"job had {world} ranks: files of two jobs are mixed. Name the folder of one, "
                    "or another --iteration."
                )
            missing = sorted(set(range(world)) - set(ranks))
            if not missing and ranks:
                return ranks, [*faults, *(f"passed over: {text}" for text in lacking)]
            text = f"iteration {iteration} lacks {_ranks_text(missing)}"
            lacking.append(text + (f" ({'; '.join(faults[:5])})" if faults else ""))
        there = f" ({', '.join(map(str, sorted(self.files)))} are there)" if wanted else ""
        cut = f". Saves of {', '.join(self.dirty[:5])} did not end" if self.dirty else ""
        raise RefusedError(
            f"{self.path} has no local checkpoint of all ranks: {'; '.join(lacking)}{there}{cut}. "
            f"{_BRING}"
        )

    def _world(self, files: Iterable[_RankFile]) -> int:
        """Return the job's number of ranks: as stated, or as far as files go."""
        stated = (file.arguments.get("world_size") for file in files)
        counted = max((rank + 1 for ranks in self.files.values() for rank in ranks), default=1)
        world = next((size for size in stated if size is not None), counted)
        if type(world) is not int or not 0 < world <= MAX_RANKS:
            raise RefusedError(f"{self.path} says that its job had {world!r:.40} ranks.")
        return world

    def _first_whole(
        self, iteration: int, rank: int, names: Sequence[str], faults: list[str], trust: bool
    ) -> _RankFile | None:
        """Return a rank's file, its own folder's first; None: no copy is whole.

        Args:
            faults: Gets a line for each copy that is damaged, or of another save by its content.

        Raises:
            RefusedError: Two copies differ.
        """
        found: _RankFile | None = None
        for name in sorted(names, key=lambda name: (Path(name).parent.name != str(rank), name)):
            try:
                file = _read_file(self.path, name, rank, iteration, trust)
            except RefusedError as error:
                faults.append(str(error).removesuffix(" Use another checkpoint.").rstrip("."))
                continue
            if found is not None and _differ(found.checksums(), file.checksums()):
                raise RefusedError(
                    f"{self.path}: {found.path} and {name} differ, and each is of rank {rank} at "
                    f"iteration {iteration}: they are of two jobs or sessions. Name the folder of "
                    "one."
                )
            found = file if found is None else replace(found, copies=(*found.copies, name))
        return found


def _differ(one: Mapping[Any, int], two: Mapping[Any, int]) -> bool:
    return any(one[key] != two[key] for key in one.keys() & two.keys())


def _files_below(
    path: Path, most: int, *, of_ranks: bool = False
) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield the files of ranks, by their paths below ``path``, in folders that are no links.

    Args:
        most: Folders of each level.
        of_ranks: Only here and in ranks' folders here.
    """
    level = [""]
    for _ in range(2 if of_ranks else _DEPTH + 1):
        below: list[str] = []
        for folder in sorted(level)[:most]:
            try:
                with os.scandir(path / folder) as entries:
                    for entry in entries:
                        name = os.path.join(folder, entry.name)
                        match = _FILE.fullmatch(entry.name)
                        if match:
                            yield name, match
                        elif entry.name.isdecimal() if of_ranks else entry.name[0] != ".":
                            below += [name] if entry.is_dir(follow_symlinks=False) else []
            except OSError:
                continue
        level = below


def _read_file(path: Path, name: str, rank: int, iteration: int, trust: bool) -> _RankFile:
    """Read one file. Raises ``RefusedError`` if it is damaged, or of another rank or iteration."""
    value = read_archive(file_inside(path, name, "the checkpoint"), trust=trust)
    root = value.state if isinstance(value, Foreign) and value.path[1] == _ROOT else None
    common = root.get("common") if isinstance(root, dict) else None
    if not isinstance(root, dict) or not isinstance(common, dict):
        raise RefusedError(
            f"{path / name} holds {type(value).__name__}, not Megatron's {_ROOT}: another program "
            "saved it."
        )
    if root.get("_is_hollow"):
        raise RefusedError(f"{path / name} is hollow: its tensors were saved elsewhere.")
    tensors: list[Mapping[str, Any]] = []
    objects: list[Mapping[str, Any]] = []
    for leaf in _leaves(root.get("sharded_state_dict"), path / name):
        kind = leaf.path[1] if isinstance(leaf, Foreign) else ""
        if kind not in ("ShardedTensor", "ShardedObject") or not isinstance(leaf.state, dict):
            raise RefusedError(f"{path / name} holds {leaf!r:.80} among its shards.")
        (tensors if kind == "ShardedTensor" else objects).append(leaf.state)
    file = _RankFile(name, rank, common, tuple(tensors), tuple(objects))
    stated = common.get("iteration", iteration), file.arguments.get("rank", rank)
    if stated != (iteration, rank):
        raise RefusedError(
            f"{path / name} is of iteration {stated[0]} and rank {stated[1]} by its content: it "
            "was renamed"
        )
    return file


def _leaves(tree: Any, where: Path) -> Iterator[Any]:
    """Yield the values of a tree of dictionaries and lists."""
    left, seen = [tree], 0
    while left:
        node, seen = left.pop(), seen + 1
        if seen + len(left) > MAX_PIECES:
            raise RefusedError(f"{where} has over {MAX_PIECES} entries. It is damaged.")
        if isinstance(node, dict | list):
            left.extend(reversed([*(node.values() if isinstance(node, dict) else node)]))
        else:
            yield node


def _check_facts(path: Path, iteration: int, files: Sequence[_RankFile]) -> None:
    """Raise ``RefusedError`` if files of one iteration are of several jobs."""
    for file in files[1:]:
        mine, first = file.facts(), files[0].facts()
        differ = sorted(
            key for key in mine.keys() | first.keys() if mine.get(key) != first.get(key)
        )
        if differ:
            raise RefusedError(
                f"{path}: {files[0].path} and {file.path}, both of iteration {iteration}, differ "
                f"in {', '.join(differ)}: they are of two jobs or sessions. Name the folder of one."
            )


def _ranks_text(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks[:16]))}{more}"


def _read(
    path: Path, ranks: Mapping[int, _RankFile], notes: Sequence[str], *, trust: bool
) -> Checkpoint:
    united = _United(path)
    for _, file in sorted(ranks.items()):
        united.add(file)
    first = ranks[min(ranks)]
    common = with_content({**first.common}, map_file(path / first.path))
    run = common.pop(_BRIDGE_STATE, None)
    metadata, replicas = united.metadata()
    kept = Common(common, COMMON_FILE)
    archives = StoredArchives(path, trust)
    reader = TorchDistReader(archives, metadata, kept, united.archives, replicas)
    checkpoint = reader.read()
    values, placed = checkpoint.values, checkpoint.placed
    if run is not None:
        values = with_run_state(values, run, path / first.path)
    copies = {file.path: file.copies for file in ranks.values()}
    files = tuple(replace(file, copies=copies.get(file.path, ())) for file in placed.files)
    return replace(
        checkpoint, layout=NAME, placed=replace(placed, files=files), values=values,
        notes=(*notes, *checkpoint.notes),
    )  # fmt: skip


@dataclass(eq=False, slots=True)
class _United:
    """Entries of all ranks: chunks by key and box, archives of objects by key."""

    path: Path
    keys: dict[str, tuple[Index, str]] = field(default_factory=dict)
    """Shape and dtype, in the order of the modules of the first rank."""
    chunks: dict[str, dict[Box, list[Chunk]]] = field(default_factory=dict)
    flat: dict[str, Index] = field(default_factory=dict)
    archives: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, Extent] = field(default_factory=dict)
    grids: dict[tuple[str, Index], set[Index]] = field(default_factory=dict)
    """Shards found of each object and grid."""
    archives_bytes: int = 0

    def add(self, file: _RankFile) -> None:
        for entry in file.tensors:
            self._add_tensor(file.path, entry)
        data = map_file(self.path / file.path)
        for entry in file.objects:
            at, shape = sizes_of(entry["global_offset"]), sizes_of(entry["global_shape"])
            key = f"{entry['key']}/shard_{_dotted(at)}_{_dotted(shape)}"
            self.grids.setdefault((str(entry["key"]), shape), set()).add(at)
            if key in self.archives:
                continue
            archive = content_of(lay_out_archive([with_content(entry["data"], data)]))
            if len(archive) > MAX_VALUE_BYTES:
                raise RefusedError(
                    f"{self.path / file.path} keeps {key}, {len(archive)} bytes that are no "
                    f"tensor, and at most {MAX_VALUE_BYTES} are carried. Save without it."
                )
            self.archives_bytes += len(archive)
            check_objects(self.path, self.archives_bytes)
            self.archives[key] = archive
            self.files[key] = Extent(file.path, 0, 0)

    def _add_tensor(self, file: str, entry: Mapping[str, Any]) -> None:
        where, key = str(self.path / file), str(entry["key"])
        whole, offset, local = (
            sizes_of(entry[name]) for name in ("global_shape", "global_offset", "local_shape")
        )
        if index(entry["prepend_axis_num"]) != len(whole) - len(local):
            raise RefusedError(f"{where}: {key} has shape {list(local)} of {list(whole)}.")
        leading = (1,) * (len(whole) - len(local))
        shape, box, numel = whole, Box(offset, (*leading, *local)), local
        part = entry.get("flattened_range")
        if part is not None:
            grid, low, high = sizes_of(entry["axis_fragmentations"]), part.start, part.stop
            at = (*(o // max(size, 1) for o, size in zip(offset, box.shape, strict=True)), low)
            shape, numel = (*grid, prod(local)), (high - low,)
            box = Box(at, (*(1,) * len(grid), high - low))
            leading = (1,) * len(grid)
            self.flat[key] = whole
        dtype = _dtype(where, key, entry["dtype"])
        check_shape(where, key, whole)
        check_shape(where, key, shape)
        check_box(where, key, box, shape)
        known = self.keys.setdefault(key, (shape, dtype))
        if known != (shape, dtype):
            raise RefusedError(
                f"{where}: {key} is {dtype}{list(shape)}, and {known[1]}{list(known[0])} in the "
                "file of another rank. Files of two jobs are mixed: name the folder of one."
            )
        data = entry["data"]
        if data is None:  # another rank of the group has it
            return
        if not isinstance(data, StoredTensor) or (data.dtype, data.shape) != (dtype, numel):
            raise RefusedError(
                f"{where}: {key} is {dtype}{list(numel)} by its entry, but {data!r:.160} lies "
                "there. It is damaged: use another checkpoint."
            )
        stored = replace(data, shape=box.shape, stride=(*(0 for _ in leading), *data.stride))
        extent = Extent(file, data.begin, box.numel * ITEM_BYTES[dtype])
        held = self.chunks.setdefault(key, {}).setdefault(box, [])
        held.append(Chunk(box, extent, stored))

    def metadata(self) -> tuple[Metadata, tuple[StoredKey, ...]]:
        """Return the tensors with one chunk for each box, and the other copies.

        Raises:
            LayoutError: Elements are nowhere.
            RefusedError: Shards of an object are nowhere: a file that states no number of ranks
                states the grids of its objects (``rng_state``: pipeline and tensor-parallel ranks).
        """
        for (key, shape), found in self.grids.items():
            if len(found) < prod(shape):
                raise RefusedError(
                    f"{self.path} has {len(found)} of the {prod(shape)} shards of {key} in a grid "
                    f"of {list(shape)}: files of ranks are missing. {_BRING}"
                )
        first, others = [], []
        for key, (shape, dtype) in self.keys.items():
            chunks = self.chunks.get(key, {}).values()
            first.append(StoredKey(key, shape, dtype, tuple(held[0] for held in chunks)))
            check_held(str(self.path), first[-1])
            again = tuple(chunk for held in chunks for chunk in held[1:])
            if again and not is_bucket(key):
                others.append(StoredKey(key, shape, dtype, again))
        return Metadata(tuple(first), self.files, self.flat, {}), tuple(others)


def _dotted(sizes: Index) -> str:
    return ".".join(map(str, sizes))


def _dtype(where: str, key: str, given: Any) -> str:
    name = given.path[1] if isinstance(given, type) and issubclass(given, Foreign) else ""
    if name not in FROM_TORCH:
        raise RefusedError(f"{where}: {key} is of dtype {given!r:.80}, which is not known.")
    return FROM_TORCH[name]
