"""DeepSpeed's own checkpoints with ZeRO, stages 1 to 3.

Stages 1 and 2 are one layout: the weights whole, masters and moments in flat buffers cut over the
ranks. Stage 3 keeps no 16-bit weights: they are its rounded masters. A conversion rounds them, as
DeepSpeed's loader does.

Names are the module's ``state_dict`` keys; buffers and frozen parameters are ``param`` too.

Source: deepspeed 0.19.8: runtime/engine.py (``_save_zero_checkpoint``), the ``state_dict`` of
runtime/zero/stage_1_and_2.py, stage3.py and runtime/bf16_optimizer.py. Differs in: no copies of the
recovery scripts (``zero_to_fp32.py``).
"""

from dataclasses import dataclass
from pathlib import Path

from scalai.converters.checkpoint import Checkpoint, CheckpointTarget, ReadOptions, WriteOptions
from scalai.converters.deepspeed.drafts import Archives, Ranks, job_of, naming
from scalai.converters.deepspeed.files import LATEST, find_tag, list_files, tag_of
from scalai.converters.deepspeed.grid import Grid
from scalai.converters.deepspeed.model_writer import add_experts, add_layers, add_model
from scalai.converters.deepspeed.optimizer_writer import add_optimizer, buffers_of
from scalai.converters.deepspeed.zero_reader import open_rank


def _lay_out(source: Checkpoint, options: WriteOptions, stage: int) -> CheckpointTarget:
    """Lay out a checkpoint of ``source`` at other degrees, with ZeRO's ``stage`` 1 to 3.

    Raises:
        RefusedError: The source has no DeepSpeed job's names, or lacks some of its tensors.
    """
    job, archives = job_of(source, options), Archives()
    ranks = Ranks.of(source, job, stage, options)
    drafts = ranks.drafts(archives, job.tag)
    for draft in drafts:
        of_experts = draft.of_experts()
        buffers = [list(buffers_of(share)) for share in of_experts]
        for rank in range(draft.dp):
            at = rank % len(of_experts)
            add_optimizer(of_experts[at], rank, buffers[at])
        for rank in range(draft.dp if stage == 3 else 1):
            add_model(of_experts[0], rank, buffers[0])
        add_experts(draft)
    for draft in drafts[: ranks.tp]:
        add_layers(draft)
    notes = [*source.notes, *drafts[0].notes(), *ranks.notes()]
    return CheckpointTarget(
        f"deepspeed_zero{stage}",
        archives.placed(),
        archives.fixed,
        naming(LATEST, job.tag),
        tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class DeepSpeedZeroLayout:
    """The layout ``deepspeed_zero<stage>``. Each finds and reads all stages."""

    stage: int
    framework: str = "deepspeed"

    @property
    def name(self) -> str:
        return f"deepspeed_zero{self.stage}"

    def find(self, path: Path) -> bool:
        """Tell whether there is a tag with files of ranks."""
        directory = find_tag(path, None)
        return directory is not None and any(directory.glob("*zero_pp_rank_*_optim_states.pt"))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a tag, or of the tag in ``latest``."""
        grid = Grid.of(list_files(tag_of(path, options.iteration)), options)
        readers = [open_rank(files, model, options.trust_pickle) for files, model in grid.models()]
        states = [reader.read() for reader in readers]
        return grid.unite(f"deepspeed_zero{readers[0].stage()}", states, is_split=True)

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Lay out a tag and ``latest``, for ``engine.load_checkpoint``."""
        return _lay_out(source, options, self.stage)
