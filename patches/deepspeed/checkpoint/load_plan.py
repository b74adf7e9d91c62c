"""What a load would do on this rank: found out whole before anything is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scalai.converters.checkpoint import PARAM
from scalai.converters.deepspeed.files import list_files
from scalai.converters.work import Work
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Collection, Tensor, split_name
from scalai.patches.deepspeed.checkpoint.filling import Row, work_into
from scalai.patches.deepspeed.checkpoint.fitting import fitted, listed, origins, used
from scalai.patches.deepspeed.checkpoint.native import Request
from scalai.patches.deepspeed.checkpoint.saved import Saved
from scalai.patches.deepspeed.checkpoint.values import own_file, read_values
from scalai.patches.deepspeed.engine.loss_scale import put_loss_scale
from scalai.patches.deepspeed.engine.masters import Master, groups_of, masters_of
from scalai.patches.deepspeed.engine.steps import STEP, put_steps
from scalai.patches.param_groups import put_groups
from scalai.runtime.live import Slot, collection_of, wanted_rows

_WAY_OUT = (
    "Build the model and the optimizer that were saved, or pass load_optimizer_states=False or "
    "load_module_strict=False where that is meant."
)


@dataclass(frozen=True, eq=False, slots=True)
class LoadPlan:
    """One rank's part of a load.

    Attributes:
        rows: The live memory that is filled.
        work: From where.
        used: Which tensors of the checkpoint this rank has a use for, [tensors].
        masters: What the optimizer updates; none where its state is not loaded.
        path: The model file that stands for this rank's.
        values: Its entries: counters, the schedule's state, the script's own.
    """

    engine: Any
    request: Request
    saved: Saved
    rows: Sequence[Row]
    work: Work
    used: npt.NDArray[np.bool_]
    masters: Sequence[Master]
    path: Path
    values: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        engine: Any,
        directory: Path,
        saved: Saved,
        request: Request,
        slots: Sequence[Slot],
    ) -> "LoadPlan":
        """Plan a load into ``slots``, all of the engine's.

        Raises:
            RefusedError: It cannot be done.
        """
        if request.custom_load_fn is not None:
            raise RefusedError(
                "custom_load_fn wants whole tensors of the checkpoint, which no rank has at other "
                f"degrees than those of {directory}. Leave it out, or convert the checkpoint by "
                "scalai reshard to the degrees and the stage of this engine."
            )
        slots = [
            slot
            for slot in slots
            if slot.tensor.numel and (request.is_whole or _kind(slot.tensor) == PARAM)
        ]
        source = {tensor.name: tensor for tensor in saved.placed.collection.tensors}
        wanted = {slot.tensor.name: slot.tensor for slot in slots}
        found = origins(source, wanted)
        _refuse_missing(wanted, found, is_strict=request.load_module_strict)
        rows = wanted_rows([slot for slot in slots if slot.tensor.name in found])
        path = own_file(engine, list_files(directory))
        plan = cls(
            engine,
            request,
            saved,
            rows,
            work_into(fitted(saved.placed, found, wanted), collection_of(rows)),
            used(saved.placed.collection, found),
            masters_of(engine) if request.is_whole else (),
            path,
            read_values(path),
        )
        plan._try_out()
        return plan

    def refuse_left_over(self, is_used: npt.NDArray[np.bool_]) -> None:
        """Refuse a checkpoint with tensors that no rank has a use for.

        ``is_used`` [tensors]: of all ranks.
        """
        if not self.request.load_module_strict:
            return
        collection: Collection = self.saved.placed.collection
        alien = [
            tensor.name
            for tensor, is_known in zip(collection.tensors, is_used, strict=True)
            if not is_known and tensor.numel and (self.request.is_whole or _kind(tensor) == PARAM)
        ]
        if alien:
            raise RefusedError(
                f"the checkpoint has {listed(alien)}, which this engine has not. {_WAY_OUT}"
            )

    def put_scalars(self) -> None:
        """Set steps, parameter groups, loss scale, schedule and counters, as they were saved."""
        engine, values, request = self.engine, self.values, self.request
        if not request.load_module_only and self._has_schedule():
            engine.lr_scheduler.load_state_dict(values["lr_scheduler"])
        if request.is_whole:
            self._put_groups(self.masters)
            if _is_scaled_dynamically(engine.optimizer):
                put_loss_scale(self.saved.loss_scale, engine.optimizer)
        elif hasattr(engine.optimizer, "refresh_fp32_params"):
            engine.optimizer.refresh_fp32_params()
        engine.loaded_checkpoint_dp_world_size = values["dp_world_size"]
        if request.load_module_only:
            return
        engine.global_steps = values["global_steps"]
        samples = engine.global_steps * engine.train_batch_size()
        engine.global_samples = values.get("global_samples", samples)
        engine.skipped_steps = values["skipped_steps"]
        engine.loaded_checkpoint_mp_world_size = values["mp_world_size"]

    def _has_schedule(self) -> bool:
        return self.request.load_lr_scheduler_states and self.engine.lr_scheduler is not None

    def _try_out(self) -> None:
        """Refuse what ``put_scalars`` could not set."""
        self._put_groups(_copies(self.masters))
        if self.request.load_module_only:
            return
        if self._has_schedule() and not isinstance(self.values.get("lr_scheduler"), Mapping):
            raise RefusedError(
                f"{self.path} has no state of a learning-rate schedule, and this engine has one. "
                "Pass load_lr_scheduler_states=False."
            )
        if self.engine.curriculum_learning_enabled() and self.values.get("data_sampler"):
            raise RefusedError(
                f"{self.path} has the state of a curriculum's data sampler, which is not carried "
                "to other degrees. Load it at the degrees and the stage that saved it."
            )

    def _put_groups(self, masters: Sequence[Master]) -> None:
        put_steps(self.saved.steps, masters, self.engine.param_names)
        if self.saved.groups["of"]:  # elastic_checkpoint keeps none
            groups = groups_of(masters, self.engine.param_names, vouched=False)
            put_groups(self.saved.groups, groups)


def _is_scaled_dynamically(optimizer: Any) -> bool:
    config = getattr(optimizer, "loss_scale_config", optimizer)
    return bool(getattr(config, "dynamic_loss_scale", False))


def _kind(tensor: Tensor) -> str:
    return split_name(tensor.name)[0]


def _refuse_missing(
    wanted: Mapping[str, Tensor], found: Mapping[str, Any], *, is_strict: bool
) -> None:
    """Refuse what the checkpoint does not fill; without strictness weights that are not trained
    may stay as they are."""
    missing = [name for name in wanted if name not in found]
    trained = {split_name(name)[1] for name in wanted if not name.startswith(f"{PARAM}/")}
    needed = [name for name in missing if is_strict or split_name(name)[1] in trained]
    if needed:
        raise RefusedError(
            f"the checkpoint has no {listed(needed)}, which this engine has. (Of an optimizer that "
            f"had made no step there are no moments.) {_WAY_OUT}"
        )


def _copies(masters: Sequence[Master]) -> list[Master]:
    """Return masters whose steps and groups may be changed without a trace."""
    groups = {id(master.group): _copied(master.group) for master in masters}
    return [
        replace(
            master,
            state=_copied({STEP: master.state[STEP]} if STEP in master.state else {}),
            group=groups[id(master.group)],
        )
        for master in masters
    ]


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of which tensors that lie in a parameter group or are a step are new."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }
