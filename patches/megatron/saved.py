"""What a save finds where it will write: an iteration is saved again where the training went back
behind it.

Megatron writes over what is there, file by file, while the tracker may name it. A checkpoint of the
same training that is whole and named stays as it is: the state would be the same. Anything else is
made invisible before its first file is written over.
"""

import json
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from scalai.store.atomic import replace_file

log = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
"""The file under ``--save`` and ``--load`` that names the newest checkpoint."""
JOURNAL = ".scalai-saves.json"
"""The file under ``--save`` that says which iterations one training has saved."""
KEPT = 16
"""So many of the newest are noted."""
LAST_WRITTEN = (".metadata", "metadata.json")
"""What the end of a save writes: a checkpoint has both. Source: ``save_state_dict_async_finalize``
and ``metadata_finalize_fn``, megatron/core/dist_checkpointing (0.14 to 0.20)."""


class SavedPlaces:
    """The folders under ``--save`` that one training has written.

    Attributes:
        run: Identity of the training, over all rounds.
    """

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)

    def is_done(self, job: Any, iteration: int) -> bool:
        """Make the place of a save ready. Collective, by all ranks, before it begins.

        Args:
            job: Megatron-LM's arguments.

        Returns:
            Whether this training has saved this iteration already, and nothing is left to do.
        """
        if not _is_in_folders(job):
            return False
        is_done = job.rank == 0 and self._make_ready(Path(job.save), iteration)
        flag = torch.tensor([int(is_done)], device=torch.cuda.current_device())
        torch.distributed.broadcast(flag, src=0)
        return bool(flag.item())

    def _make_ready(self, root: Path, iteration: int) -> bool:
        folder, named = _folder(root, iteration), _named(root)
        saved = self._read(root)
        if named == iteration and iteration in saved and _is_whole(folder):
            log.warning(
                "event=saved_before iteration=%d: this training has saved it, and the tracker "
                "names it; %s stays as it is.", iteration, folder,
            )  # fmt: skip
            return True
        if any(file.exists() for file in _files(folder)):
            if named == iteration:
                _name_another(root, iteration)
            log.warning("event=saved_anew iteration=%d what %s held goes", iteration, folder)
            for file in _files(folder):
                file.unlink(missing_ok=True)
        self._write(root, [*(i for i in saved if i != iteration), iteration][-KEPT:])
        return False

    def _read(self, root: Path) -> list[int]:
        try:
            noted = json.loads((root / JOURNAL).read_text())
        except (OSError, ValueError):
            return []
        return [int(i) for i in noted["iterations"]] if noted.get("run") == self.run else []

    def _write(self, root: Path, iterations: list[int]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        noted = json.dumps({"run": self.run, "iterations": iterations})
        replace_file(root / JOURNAL, noted.encode(), is_durable=False)


def _is_in_folders(job: Any) -> bool:
    """Whether a save makes a folder with ``.metadata``, of files of this machine's file systems."""
    is_sharded = getattr(job, "ckpt_format", None) == "torch_dist"
    return bool(job.save) and is_sharded and "://" not in str(job.save)


def _folder(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def _named(root: Path) -> int | None:
    """Return the iteration that the tracker names."""
    try:
        text = (root / TRACKER).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in LAST_WRITTEN)


def _name_another(root: Path, iteration: int) -> None:
    """Have the tracker name the newest other checkpoint that is whole, or nothing."""
    others = [
        int(folder.name.removeprefix("iter_"))
        for folder in root.glob("iter_*")
        if folder.name.removeprefix("iter_").isdigit() and _is_whole(folder)
    ]
    older = max((other for other in others if other != iteration), default=None)
    tracker = root / TRACKER
    if older is None:
        tracker.unlink(missing_ok=True)
    else:
        replace_file(tracker, str(older).encode(), is_durable=False)
    log.warning("event=tracker names=%s while iteration %d is written anew", older, iteration)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint, first those without which it is none; what else a person
    keeps there is not touched."""
    yield from (folder / name for name in LAST_WRITTEN)
    yield folder / "common.pt"
    yield from sorted(folder.glob("*.distcp"))
