"""Takes a trainer's files along to a checkpoint's target.

Copies all byte for byte, pickles unread, except two that depend on the number of ranks: a target's
rank gets the RNG states of a source's rank; a schedule stepped by every rank under Accelerate is
rewritten.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from scalai.converters.checkpoint import AuxiliaryFile, Checkpoint, Target
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.hugging_face.companions import Companions, find_companions
from scalai.converters.hugging_face.schedule import FUNCTIONS, counts_ranks, read_schedule, rescaled
from scalai.core.errors import RefusedError

_OF_MODEL = re.compile(r"(?!trainer_state|zero_to_).*\.(?:json|txt|model|jinja|tiktoken|py)")
"""Files of a model and its tokenizer: all that ``from_pretrained`` reads, except weights."""
_INDEX = ".index.json"
_SCHEDULE = re.compile(r"scheduler(?:_\d+)?\.bin")
_PLACES = re.compile(r"dl_state_dict(?:_\d+)?\.bin")


def accompanied(source: Checkpoint, target: Target, degrees: Mapping[str, int]) -> Target:
    """Return a target with the trainer's files from beside the source.

    Args:
        source: The checkpoint to convert.
        target: Its target.
        degrees: Degrees of the target; the source's by default.

    Raises:
        RefusedError: RNG states do not match the source's ranks; or as ``find_companions``.
    """
    companions = find_companions(source)
    if companions is None or source.changed:
        return target
    if target.layout == "safetensors":
        files = [name for name in companions.files if _OF_MODEL.fullmatch(name)]
        kept = [name for name in files if not name.endswith(_INDEX)]
        return replace(target, auxiliary=tuple(_copy(companions, name) for name in kept))
    if not target.layout.startswith("deepspeed_"):
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
            "engine's go along"
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
