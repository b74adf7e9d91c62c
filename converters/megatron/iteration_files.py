"""Files beside the tensors of Megatron's iterations, found and taken along to a target.

    <root>/latest_train_state.pt
    <root>/energon/iter_0000006/train_dataloader_dprank000.pt
    <root>/iter_0000006/run_config.yaml  train_state.pt       Megatron-Bridge's
    <root>/iter_0000006/tokenizer/                            also of later Megatron-LM

Bridge compares TP and PP of a job with ``run_config.yaml``: where they are equal it loads RNG
states, and any optimizer. So the degrees there become the target's, and RNG states begin for them.
``train_state.pt`` has the counters of samples; its copy at the root names the newest iteration.

Source: ``save_checkpoint``, ``_load_checkpoint_from_path`` and ``maybe_save_dataloader_state`` of
megatron/bridge/training/checkpointing.py and utils/checkpoint_utils.py (2026-08);
``save_tokenizer_assets`` and ``maybe_save_dataloader_state`` of Megatron-LM.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalai.converters.bounded import open_regular
from scalai.converters.checkpoint import (
    PARAM,
    REPORT,
    AuxiliaryFile,
    Checkpoint,
    CheckpointTarget,
    Values,
)
from scalai.converters.megatron.beside_tensors import DEGREE_ARGUMENTS, folder_of
from scalai.converters.torch_archive import (
    NewTensor,
    content_of,
    lay_out_archive,
    read_archive,
    with_content,
)
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import split_name
from scalai.store.files import map_file, number_of

CONFIG, STATE, LATEST_STATE = "run_config.yaml", "train_state.pt", "latest_train_state.pt"
RUN = "bridge_run"
"""In ``Values.extra``: a run's arguments for RNG states, by the names of Megatron-LM."""
KEPT_STATE = "bridge_train_state"
"""In ``Values.extra``: the content of ``train_state.pt``, of a source without this file."""

MAX_CONFIG_BYTES = 16 << 20
MAX_FILES, MAX_BYTES = 1000, 256 << 20
"""Of all files that are taken along."""

_READS = ("torch_dist", "fsdp_dtensor")
"""Layouts that Bridge loads."""
_OWN = re.compile(
    r"\..*|metadata\.json|common\.pt|scalai\.json|latest_.*|.*\.distcp|mp_rank_.*"
    r"|layer_wise_optimizer_.*|train_dataloader_dprank\d+\.pt"
)
_OF_TENSORS = re.compile(
    r"\.metadata|.*\.distcp|.*\.safetensors|.*_states\.pt|model_optim_rng\.pt|common\.pt"
)
"""Files in a folder that is a checkpoint of its own."""
_OF_TOKENIZER = re.compile(r".*\.(?:json|txt|model|jinja|tiktoken)")
INTEGRITY = "integrity.json"
"""Hashes of all other files of a save, by later megatron-core."""
_PLACE = re.compile(r"train_dataloader_dprank(\d{1,9})\.pt")

_COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_OF_STAGES = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)  # fmt: skip
_GROUP_SIZE = "microbatch_group_size_per_vp_stage"


@dataclass(frozen=True, slots=True)
class _Entry:
    """Lines ``first <= line < stop`` of a setting; ``value`` is the text after its colon."""

    first: int
    stop: int
    value: str


@dataclass(frozen=True, slots=True)
class RunConfig:
    """``run_config.yaml`` as lines: blocks of settings, as PyYAML writes them."""

    lines: tuple[str, ...]
    entries: Mapping[tuple[str, str], _Entry]

    def number(self, block: str, name: str) -> int | None:
        entry = self.entries.get((block, name))
        return int(entry.value) if entry and re.fullmatch(r"\d{1,9}", entry.value) else None

    def text(self, block: str, name: str) -> str:
        entry = self.entries.get((block, name))
        return entry.value if entry else ""

    def changed(self, values: Mapping[tuple[str, str], str]) -> bytes:
        """Return the file with other values; settings that it has not stay out."""
        lines = list(self.lines)
        known = [
            (self.entries[at], at[1], text) for at, text in values.items() if at in self.entries
        ]
        for entry, name, text in sorted(known, key=lambda of: -of[0].first):
            lines[entry.first : entry.stop] = [f"  {name}: {text}"]
        return "".join(f"{line}\n" for line in lines).encode()


def read_config(path: Path) -> RunConfig | None:
    """Return Bridge's settings; None: there is no such file.

    Raises:
        RefusedError: It is no text, too long, or has a setting twice.
    """
    if not path.exists():
        return None
    try:
        with open_regular(path) as file:
            text = file.read(MAX_CONFIG_BYTES + 1).decode()
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"{path} cannot be read as text ({error}). Remove or mend it."
        ) from error
    if len(text) > MAX_CONFIG_BYTES:
        raise RefusedError(f"{path} has over {MAX_CONFIG_BYTES} bytes. Remove or mend it.")
    lines = text.splitlines()
    entries: dict[tuple[str, str], _Entry] = {}
    block: str | None = None
    last: tuple[str, str] | None = None
    for at, line in enumerate(lines):
        if line.strip() and not line.startswith(" "):
            named = re.fullmatch(r"([A-Za-z_]\w*):\s*", line)
            block, last = named[1] if named else None, None
        elif block and (found := re.fullmatch(r"  ([A-Za-z_]\w*):(?: (.*))?", line)):
            last = block, found[1]
            if last in entries:
                raise RefusedError(f"{path} has {block}.{found[1]} twice. Remove or mend it.")
            entries[last] = _Entry(at, at + 1, (found[2] or "").strip())
        elif last is not None:
            entries[last] = replace(entries[last], stop=at + 1)
    return RunConfig(tuple(lines), entries)


@dataclass(frozen=True, slots=True)
class BridgeRun:
    """Facts of a run of Bridge: degrees, counters of samples, arguments for RNG states."""

    degrees: Mapping[str, int]
    counters: Mapping[str, int]
    extra: Mapping[str, Any]


def read_run(directory: Path, step: int) -> BridgeRun:
    """Return what Bridge's files say of an iteration; nothing where there are none.

    Raises:
        RefusedError: They are damaged, or of another iteration.
    """
    config, path, counters = read_config(directory / CONFIG), directory / STATE, {}
    if path.exists():
        counters = _counters(with_content(read_archive(path), map_file(path)), path, step)
    if config is None:
        return BridgeRun({}, counters, {})
    sizes = {
        axis: config.number("model", name)
        for axis, name in DEGREE_ARGUMENTS.items()
        if axis != "dp"
    }
    backend = config.text("dist", "distributed_backend")
    run = {
        "seed": config.number("rng", "seed"),
        "data_parallel_random_init": config.text("rng", "data_parallel_random_init") == "true",
        "distributed_backend": backend,
    }
    degrees = {axis: size for axis, size in sizes.items() if size is not None}
    return BridgeRun(degrees, counters, {RUN: run})


def with_run_state(values: Values, state: Any, where: Path) -> Values:
    """Return the values of a checkpoint that keeps the content of ``train_state.pt`` in another
    file. Raises as ``read_run``."""
    counters = {**values.counters, **_counters(state, where, values.step)}
    return replace(values, counters=counters, extra={**values.extra, KEPT_STATE: state})


def _counters(state: Any, where: Path, step: int) -> dict[str, int]:
    """Return the counters of samples of a ``TrainState``, whose step must be ``step``."""
    found: dict[str, int] = {}
    if isinstance(state, Mapping):
        for name in ("step", *_COUNTERS):
            value = state.get(name)
            if isinstance(value, NewTensor) and value.shape == () and value.dtype == "I64":
                found[name] = int(number_of(value.content or b"", "I64"))
    if "step" not in found or min(found.values()) < 0:
        raise RefusedError(
            f"{where} has no step, or a negative counter: it is not Megatron-Bridge's, or damaged. "
            "Remove it, or use another checkpoint."
        )
    if found["step"] != step:
        raise RefusedError(
            f"{where} is of step {found['step']}, and the tensors are of {step}. Files of two "
            "checkpoints are mixed: use another one."
        )
    return {name: found[name] for name in _COUNTERS if name in found}


def with_iteration_files(
    source: Checkpoint, target: CheckpointTarget, degrees: Mapping[str, int]
) -> CheckpointTarget:
    """Return a target with the files beside a Megatron iteration; notes name those left out.

    Args:
        degrees: Degrees of the target.
    """
    carrying = _Carrying(source, target, degrees)
    if KEPT_STATE in source.values.extra:
        carrying.take_run()
    else:
        carrying.run()
    return replace(
        target,
        auxiliary=(*target.auxiliary, *carrying.files.values()),
        notes=(*target.notes, *carrying.notes),
    )


class _Carrying:
    def __init__(
        self, source: Checkpoint, target: CheckpointTarget, degrees: Mapping[str, int]
    ) -> None:
        self._source, self._target, self._degrees = source, target, degrees
        self._here = source.directory
        self._folder = folder_of(source.values.step)
        self._taken = {file.path for file in target.auxiliary}
        self._room = MAX_BYTES
        self.files: dict[str, AuxiliaryFile] = {}
        self.notes: list[str] = []

    def run(self) -> None:
        """Collect the files and the notes."""
        entries = sorted(e for e in self._here.iterdir() if not _OWN.fullmatch(e.name))
        is_megatron = self._target.layout in (*_READS, "torch")
        left = []
        for entry in entries:
            if entry.name in (CONFIG, STATE):
                if self._target.layout not in _READS:
                    left.append(entry.name)
            elif entry.name == INTEGRITY:
                self.notes.append(
                    f"left out: {INTEGRITY}, the source's hashes of its files: load without "
                    f"checks of them, {REPORT} proves the target"
                )
            elif is_megatron:
                self._take(entry)
            elif self._target.layout == "safetensors" and entry.name == "tokenizer":
                self._take_tokenizer(entry)
            else:
                left.append(entry.name)
        if left:
            more = " ..." * (len(left) > 8)
            self.notes.append(
                f"left out: {', '.join(left[:8])}{more}, beside the tensors, for which "
                f"{self._target.layout} has no place"
            )
        self.take_run()
        if is_megatron:
            self._take_places()

    def _copy(self, path: Path, to: str) -> None:
        self.files[to] = AuxiliaryFile(to, path.stat().st_size, path)

    def _take(self, entry: Path) -> None:
        found = self._found(entry)
        if isinstance(found, str):
            self.notes.append(f"left out: {entry.name}, beside the tensors: {found}")
            return
        for path in found:
            self._copy(path, f"{self._folder}/{path.relative_to(self._here)}")

    def _take_tokenizer(self, entry: Path) -> None:
        found = self._found(entry)
        if isinstance(found, str):
            self.notes.append(f"left out: {entry.name}: {found}")
            return
        named = [(path, str(path.relative_to(entry))) for path in found]
        kept = [(path, to) for path, to in named if _OF_TOKENIZER.fullmatch(to)]
        for path, to in kept:
            if to not in self._taken:
                self._copy(path, to)
        if kept:
            self.notes.append(f"the tokenizer's {len(kept)} files go along")

    def _found(self, entry: Path) -> list[Path] | str:
        """Return an entry's files, or the reason against taking it."""
        found: list[Path] = []
        room = self._room
        for path in _below(entry):
            mode = path.lstat()
            if stat.S_ISDIR(mode.st_mode):
                continue
            if not stat.S_ISREG(mode.st_mode):
                return f"{path.name} is a link, or no regular file"
            if path != entry and _OF_TENSORS.fullmatch(path.name):
                return f"{path.name} in it is of a checkpoint of its own"
            room -= mode.st_size
            found.append(path)
            if room < 0 or len(found) + len(self.files) > MAX_FILES:
                return (
                    f"files beside the tensors are copied up to {MAX_BYTES >> 20} MB and "
                    f"{MAX_FILES} files; copy it yourself"
                )
        self._room = room
        return found

    def take_run(self) -> None:
        """Take Bridge's settings at the new degrees, and its counters, to a layout it loads."""
        if self._target.layout not in _READS:
            return
        state, kept = self._here / STATE, self._source.values.extra.get(KEPT_STATE)
        for to in (f"{self._folder}/{STATE}", LATEST_STATE):
            if kept is not None:
                content = content_of(lay_out_archive(kept, "train_state"))
                self.files[to] = AuxiliaryFile(to, len(content), content=content)
            elif state.exists():
                self._copy(state, to)
        config = read_config(self._here / CONFIG)
        if config is None and kept is not None:
            self.notes.append(
                f"Megatron-Bridge loads the target with a {CONFIG} in {self._folder} alone, and "
                f"{self._here} has none: put one of the job's global checkpoints there (of an "
                "iter_ folder) and convert again, then it goes along with the new degrees"
            )
        if config is None:
            return
        if config.number("model", DEGREE_ARGUMENTS["tp"]) is None:
            self.notes.append(
                f"left out: {CONFIG}, which states no {DEGREE_ARGUMENTS['tp']} in a block 'model', "
                "as Megatron-Bridge does for models of one set of degrees"
            )
            return
        content = config.changed(self._settings(config))
        path = f"{self._folder}/{CONFIG}"
        self.files[path] = AuxiliaryFile(path, len(content), content=content)
        if self._source.changed:
            self.notes.append(
                f"{CONFIG} keeps the source's model: tensors were renamed or padded since"
            )

    def _settings(self, config: RunConfig) -> dict[tuple[str, str], str]:
        degrees = self._degrees
        values: dict[tuple[str, str], str] = {}
        for axis, name in DEGREE_ARGUMENTS.items():
            size = degrees.get(axis)
            is_on = config.text("model", name) != "null"
            if axis != "dp" and size is not None and (is_on or size > 1):
                is_off = axis == "vpp" and size == 1
                values["model", name] = "null" if is_off else str(size)
        before, after = (
            (of.get("pp", 1), of.get("vpp", 1)) for of in (self._source.values.degrees, degrees)
        )
        stated = [n for n in _OF_STAGES if config.text("model", n) != "null"]
        stated = [name for name in stated if ("model", name) in config.entries]
        if before != after and stated:
            values |= {("model", name): "null" for name in stated}
            self.notes.append(f"{CONFIG} loses {', '.join(stated)}, of other stages")
        if config.number("model", _GROUP_SIZE) == before[0]:
            values["model", _GROUP_SIZE] = str(after[0])
        if degrees.get("tp", 1) == 1 and config.text("model", "sequence_parallel") == "true":
            values["model", "sequence_parallel"] = "false"
        values["checkpoint", "ckpt_format"] = self._target.layout
        kinds = {split_name(t.name)[0] for t in self._target.placed.collection.tensors}
        if kinds <= {PARAM}:
            values["checkpoint", "save_optim"] = "false"
        return values

    def _take_places(self) -> None:
        """Take the places of ranks in the data; each belongs to one of a number of ranks."""
        root, name = self._here.parent, self._here.name
        folders = [self._here, self._here / "mp_rank_00"]
        if name == self._folder:
            beside = (e / name for e in sorted(root.iterdir()) if not e.is_symlink())
            folders += [p for of in beside if of != self._here for p in (of, of / "mp_rank_00")]
        for folder in folders:
            self._take_places_of(folder, root)

    def _take_places_of(self, folder: Path, root: Path) -> None:
        found = {}
        if folder.is_dir() and not folder.is_symlink():
            for path in sorted(folder.iterdir()):
                if (match := _PLACE.fullmatch(path.name)) and path.is_file():
                    found[int(match[1])] = path
        if not found:
            return
        dp = self._degrees.get("dp")
        old = self._source.values.degrees
        axes = {axis for axis in ("tp", "pp", "cp") if self._degrees.get(axis) != old.get(axis)}
        is_same = dp == len(found) if dp is not None else not axes
        where = folder.relative_to(root)
        if not is_same or set(found) != set(range(len(found))):
            self.notes.append(
                f"left out: {where}/train_dataloader_dprank*.pt of {len(found)} ranks, Energon's "
                "places in the data, which belong to that number of ranks. Energon's own tool "
                "(energon checkpoint redist) makes them for others; without them the job begins "
                "its data anew"
            )
            return
        if any(path.is_symlink() for path in found.values()):
            self.notes.append(f"left out: {where}/train_dataloader_dprank*.pt: they are links")
            return
        for path in found.values():
            to = path.relative_to(root)
            parts = [self._folder if part == self._here.name else part for part in to.parts]
            self._copy(path, "/".join(parts))


def _below(entry: Path) -> Iterator[Path]:
    """Yield an entry and all below it, following no link."""
    yield entry
    if entry.is_symlink() or not entry.is_dir():
        return
    for folder, folders, files in os.walk(entry):
        folders.sort()
        yield from (Path(folder) / name for name in sorted((*folders, *files)))
