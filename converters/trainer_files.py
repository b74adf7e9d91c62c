"""Files of transformers' Trainer and of Accelerate beside an engine's checkpoint: found, and taken
along to a target.

    checkpoint-100/             transformers' Trainer
        global_step100/  latest                     the engine's
        trainer_state.json  scheduler.pt  rng_state_<rank>.pth  training_args.bin
        config.json  generation_config.json  tokenizer files  model.safetensors
    <output_dir>/               Accelerate's save_state
        pytorch_model/  latest                      the engine's
        random_states_<rank>.pkl  scheduler.bin  sampler.bin  custom_checkpoint_<n>.pkl

All are copied byte for byte, pickles unread, except two that depend on the number of ranks: a
target's rank gets the RNG states of a source's rank; a schedule stepped by every rank under
Accelerate is rewritten.

Source: ``_save_checkpoint`` of transformers/trainer.py, 5.23; ``save_state`` of
accelerate/accelerator.py and ``save_accelerator_state`` of checkpointing.py, 1.15.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from scalai.converters.checkpoint import REPORT, AuxiliaryFile, Checkpoint, CheckpointTarget
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.deepspeed.tag_files import LATEST, carried, read_dictionary
from scalai.converters.layouts import layout_named
from scalai.converters.megatron.iteration_files import KEPT_STATE, with_iteration_files
from scalai.converters.opening import file_inside
from scalai.converters.torch_archive import lay_out_archive
from scalai.core.errors import RefusedError

TRAINER_STATE = "trainer_state.json"
ONE_RANK = "rng_state.pth"
"""Trainer's file of RNG states in a job of one rank."""

ADAPTER = "adapter_model.safetensors"
"""PEFT's adapter."""
NO_MODEL = (
    f"these are an adapter's tensors under the engine's names, not a model: PEFT loads {ADAPTER} "
    "beside SRC, and scalai reshard BASE DST --merge-adapter SRC makes a model of it"
)

_STREAMS = re.compile(r"(?:rng_state_(\d+)\.pth|random_states_(\d+)\.pkl)")
_OF_ENGINE = frozenset({LATEST, "latest_universal", REPORT})

SavedBy = Literal["transformers' Trainer", "Accelerate"]


@dataclass(frozen=True, slots=True)
class Companions:
    """Files beside an engine's checkpoint.

    Attributes:
        directory: Directory of the files, and of the engine's tag.
        saved_by: Trainer that saved them.
        files: Paths in the directory, sorted; without the RNG states.
        streams: Files of RNG states, by rank.
        other_tags: Folders of further engines, or of other steps.
    """

    directory: Path
    saved_by: SavedBy
    files: tuple[str, ...]
    streams: Mapping[int, str]
    other_tags: tuple[str, ...]

    def stream_file(self, rank: int, world: int) -> str:
        """Return a rank's file of RNG states in a job of ``world`` ranks."""
        if self.saved_by == "Accelerate":
            return f"random_states_{rank}.pkl"
        return ONE_RANK if world == 1 else f"rng_state_{rank}.pth"


def find_companions(checkpoint: Checkpoint) -> Companions | None:
    """Return a trainer's files beside a DeepSpeed checkpoint; None: there are none.

    Raises:
        RefusedError: A file is a link to outside; a rank's RNG states are missing.
    """
    if layout_named(checkpoint.layout).framework != "deepspeed":
        return None
    directory = checkpoint.directory.parent
    saved_by = _saved_by(directory)
    if saved_by is None:
        return None
    entries = [entry for entry in directory.iterdir() if not entry.name.startswith(".")]
    tags = {entry.name for entry in entries if entry.is_dir() and _is_tag(entry)}
    files, streams = [], {}
    for name in sorted(_below(directory, tags)):
        rank = _rank_of(name)
        if rank is None:
            files.append(name)
        else:
            streams[rank] = name
    missing = sorted(set(range(len(streams))) - streams.keys())
    if missing:
        raise RefusedError(
            f"{directory} has RNG states of {len(streams)} ranks, and none of rank "
            f"{missing[0]} ({streams[max(streams)]} is there). Copy the missing files of the same "
            "save, or use another checkpoint."
        )
    others = tuple(sorted(tags - {checkpoint.directory.name}))
    return Companions(directory, saved_by, tuple(files), streams, others)


def _saved_by(directory: Path) -> SavedBy | None:
    if (directory / TRAINER_STATE).is_file():
        return "transformers' Trainer"
    if any(directory.glob("random_states_*.pkl")):
        return "Accelerate"
    return None


def _is_tag(directory: Path) -> bool:
    return any(directory.glob("*_states.pt")) or (directory / "zero").is_dir()


def _below(directory: Path, tags: set[str]) -> Iterator[str]:
    for path in directory.rglob("*"):
        name = path.relative_to(directory)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if is_hidden or name.parts[0] in tags or str(name) in _OF_ENGINE or path.is_dir():
            continue
        yield str(file_inside(directory, str(name), TRAINER_STATE).relative_to(directory))


def _rank_of(name: str) -> int | None:
    """Return the rank of a file of RNG states; None: another file."""
    match = _STREAMS.fullmatch(name)
    if match is None:
        return 0 if name == ONE_RANK else None
    return int(match[1] or match[2])


AT, COUNT, FUNCTIONS = "last_epoch", "_step_count", "lr_lambdas"
"""Entries of LambdaLR's state: its position, its count of steps, and its functions, which the job's
script defines anew."""


def counts_ranks(state: dict[str, Any], step: int, world: int) -> bool:
    """Tell whether a schedule was stepped by every rank.

    Args:
        state: The schedule's state.
        step: Steps of the engine, overflows included.
        world: Number of ranks.
    """
    at = state.get(AT)
    return type(at) is int and at > 0 and not at % world and (world == 1 or at != step)


def read_schedule(path: Path) -> dict[str, Any]:
    """Return a schedule's state. ``RefusedError``: its pickle is not allowed."""
    state: dict[str, Any] = carried(read_dictionary(path, trust=False), path)
    return state


def rescaled(state: dict[str, Any], before: int, after: int) -> bytes:
    """Return the file of a LambdaLR's state for ``after`` ranks instead of ``before``."""
    at = state[AT] // before * after
    count = state.get(COUNT, state[AT] + 1) + at - state[AT]
    archive = lay_out_archive({**state, AT: at, COUNT: count}, "scheduler")
    content = bytearray(archive.size_bytes)
    for begin, data in archive.fixed:
        content[begin : begin + len(data)] = data
    return bytes(content)


_OF_MODEL = re.compile(r"(?!trainer_state|zero_to_).*\.(?:json|txt|model|jinja|tiktoken|py)")
"""Files of a model and its tokenizer: all that ``from_pretrained`` reads, except weights."""
_INDEX = ".index.json"


def _is_of_model(name: str) -> bool:
    return bool(_OF_MODEL.fullmatch(name)) and not name.endswith(_INDEX)


def model_files(directory: Path) -> list[str]:
    """Return the files of a model and its tokenizer in a directory, except weights, sorted.

    Raises:
        RefusedError: One is a link to outside.
    """
    names = sorted(entry.name for entry in directory.iterdir() if entry.is_file())
    return [str(file_inside(directory, n, n).name) for n in names if _is_of_model(n)]


_SCHEDULE = re.compile(r"scheduler(?:_\d+)?\.bin")
_ITERATIONS = ("torch_dist", "torch", "fsdp_dtensor")
"""Layouts of Megatron's iterations."""
_PLACES = re.compile(r"dl_state_dict(?:_\d+)?\.bin")


def accompanied(
    source: Checkpoint, target: CheckpointTarget, degrees: Mapping[str, int]
) -> CheckpointTarget:
    """Return a target with the trainer's files from beside the source.

    Args:
        source: The checkpoint to convert.
        target: Its target.
        degrees: Degrees of the target; the source's by default.

    Raises:
        RefusedError: RNG states do not match the source's ranks; or as ``find_companions``.
    """
    if source.layout in _ITERATIONS or KEPT_STATE in source.values.extra:
        return with_iteration_files(source, target, degrees)
    companions = find_companions(source)
    if companions is None or source.changed:
        return target
    if target.layout == "safetensors":
        kept = tuple(_copy(companions, name) for name in filter(_is_of_model, companions.files))
        of_adapter = (NO_MODEL,) if ADAPTER in companions.files else ()
        return replace(target, auxiliary=kept, notes=(*target.notes, *of_adapter))
    if layout_named(target.layout).framework != "deepspeed":
        return target
    carrying = _Carrying(source, companions, *_worlds(source, companions, degrees))
    notes: list[str] = []
    auxiliary = tuple(carrying.files(notes))
    return replace(target, auxiliary=auxiliary, notes=(*target.notes, *notes, *carrying.notes()))


def _worlds(
    source: Checkpoint, companions: Companions, degrees: Mapping[str, int]
) -> tuple[int, int]:
    axes = ("dp", "tp", "pp")
    known = source.values.degrees
    before = prod(known.get(axis, 1) for axis in axes) if "dp" in known else len(companions.streams)
    if companions.streams and len(companions.streams) != before:
        raise RefusedError(
            f"{companions.directory} has RNG states of {len(companions.streams)} ranks, and "
            f"was saved by {before}. Copy the missing files of the same save, or remove all of "
            f"them ({companions.streams[0]} ...) to begin new streams."
        )
    after = prod({"dp": before, **known, **degrees}.get(axis, 1) for axis in axes)
    return before, after


def _copy(companions: Companions, name: str, path: str | None = None) -> AuxiliaryFile:
    source = companions.directory / name
    return AuxiliaryFile(path or name, source.stat().st_size, source)


@dataclass(frozen=True, slots=True)
class _Carrying:
    """The files for a target of ``after`` ranks from a source of ``before``."""

    source: Checkpoint
    companions: Companions
    before: int
    after: int

    def files(self, notes: list[str]) -> Iterator[AuxiliaryFile]:
        """Yield the target's files; adds changes to ``notes``."""
        for name in self.companions.files:
            is_of_ranks = self.companions.saved_by == "Accelerate" and self.before != self.after
            content = self._schedule(name, notes) if is_of_ranks else None
            if content is None:
                yield _copy(self.companions, name)
            else:
                yield AuxiliaryFile(name, len(content), content=content)
        if self.companions.streams:
            for rank in range(self.after):
                of = self.companions.streams[rank % self.before]
                yield _copy(self.companions, of, self.companions.stream_file(rank, self.after))

    def notes(self) -> Iterator[str]:
        """Yield notes for the target's job."""
        yield (
            f"saved by {self.companions.saved_by}: {len(self.companions.files)} files beside the "
            f"engine's go along{f', {ADAPTER} among them' * (ADAPTER in self.companions.files)}"
        )
        if self.companions.other_tags:
            yield (
                f"left out: {', '.join(self.companions.other_tags)}, of other engines or steps; "
                "convert each by its own path"
            )
        if self.before == self.after:
            return
        if self.companions.streams:
            yield (
                f"RNG states: rank r of {self.after} goes on with those of rank r modulo "
                f"{self.before}"
            )
        samples = self._samples()
        yield (
            f"{self.companions.saved_by} finds its place in the data by steps: micro-batch × "
            f"accumulation × {self.after} ranks must stay "
            f"{samples or 'what it was'}, then the samples of each step do too"
        )

    def _samples(self) -> int | None:
        job = self.source.values.extra.get(STATE)
        config = job.model.get("ds_config") if isinstance(job, DeepSpeedJob) else None
        size = config.get("train_batch_size") if isinstance(config, Mapping) else None
        return size if isinstance(size, int) else None

    def _schedule(self, name: str, notes: list[str]) -> bytes | None:
        """Return the new content of a file with a count over all ranks; None: keep the file."""
        if _PLACES.fullmatch(name):
            notes.append(
                f"{name} is torchdata's place in the data of {self.before} ranks: without it, "
                "skip_first_batches finds the place"
            )
        if not _SCHEDULE.fullmatch(name):
            return None
        try:
            state = read_schedule(self.companions.directory / name)
        except RefusedError as error:
            notes.append(f"{name} stays as it is, for {self.before} ranks: {error}")
            return None
        if not counts_ranks(state, self.source.values.step, self.before):
            return None
        if FUNCTIONS not in state:
            notes.append(
                f"{name} stays as it is: a schedule that Accelerate steps once a rank, not made of "
                f"functions of the step (LambdaLR), goes on as for {self.before} ranks"
            )
            return None
        notes.append(
            f"{name} stands where {self.after} ranks would have stepped it, as Accelerate does "
            "without split_batches"
        )
        return rescaled(state, self.before, self.after)


def describe_companions(checkpoint: Checkpoint) -> dict[str, object] | None:
    """Return a checkpoint's trainer and files as plain values; None: there are none."""
    found = find_companions(checkpoint)
    if found is None:
        return None
    return {
        "saved_by": found.saved_by,
        "files": list(found.files),
        "rng_states": len(found.streams),
    }
