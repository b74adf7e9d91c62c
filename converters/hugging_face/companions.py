"""Finds a trainer's files beside an engine's checkpoint, and their ranks.

    checkpoint-100/             transformers' Trainer
        global_step100/  latest                     the engine's
        trainer_state.json  scheduler.pt  rng_state_<rank>.pth  training_args.bin
        config.json  generation_config.json  tokenizer files  model.safetensors
    <output_dir>/               Accelerate's save_state
        pytorch_model/  latest                      the engine's
        random_states_<rank>.pkl  scheduler.bin  sampler.bin  custom_checkpoint_<n>.pkl

Source: ``_save_checkpoint`` of transformers/trainer.py, 5.23; ``save_state`` of
accelerate/accelerator.py and ``save_accelerator_state`` of checkpointing.py, 1.15.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scalai.converters.checkpoint import REPORT, Checkpoint
from scalai.converters.deepspeed.files import LATEST
from scalai.converters.opening import file_inside
from scalai.core.errors import RefusedError

TRAINER_STATE = "trainer_state.json"
ONE_RANK = "rng_state.pth"
"""Trainer's file of RNG states in a job of one rank."""

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
    if not checkpoint.layout.startswith("deepspeed_"):
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
