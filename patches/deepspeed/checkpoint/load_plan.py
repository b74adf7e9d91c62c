"""One rank's part of a load, planned whole before anything is written: a checkpoint's tensors under
the engine's names and dtypes.

Names of parameters are the same. Kinds and dtypes differ with the precision: fp32 weights are their
own masters (``param``), 16-bit ones have masters beside them (``main``). So weights of another
dtype than the checkpoint's come from the fp32 values, rounded for 16 bits, as ZeRO's own load makes
the weights from the masters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scalai.converters.checkpoint import MAIN, PARAM, PlacedTensors
from scalai.converters.deepspeed.tag_files import list_files
from scalai.converters.work import Work
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Collection, Tensor, split_name
from scalai.core.tensors.dtypes import HALF
from scalai.patches.deepspeed.checkpoint.filling import Row, work_into
from scalai.patches.deepspeed.checkpoint.model_file import LoadRequest, own_file, read_values
from scalai.patches.deepspeed.checkpoint.saved_checkpoint import SavedCheckpoint
from scalai.patches.deepspeed.masters import Master, groups_of, masters_of
from scalai.patches.deepspeed.small_state import STEP, put_loss_scale, put_steps
from scalai.patches.optimizers import put_groups
from scalai.runtime.live import Slot, collection_of, wanted_rows

NAMED = 5
"""Tensors named in an error."""

_FP32 = "F32"


@dataclass(frozen=True, slots=True)
class TensorOrigin:
    """A checkpoint's tensor as the source of an engine's; rounded to the engine's dtype."""

    tensor: Tensor
    is_rounded: bool = False


def origins(source: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, TensorOrigin]:
    """Return the sources by an engine's tensor. Tensors without a source are left out.

    Raises:
        RefusedError: Shapes differ, or dtypes other than from fp32.
    """
    found, unfit = {}, []
    for name, tensor in wanted.items():
        origin = _origin(source, tensor)
        if origin is None:
            continue
        found[name] = origin
        if origin.tensor.shape != tensor.shape:
            unfit.append((origin.tensor, tensor))
        elif origin.tensor.dtype != tensor.dtype and not origin.is_rounded:
            unfit.append((origin.tensor, tensor))
    if unfit:
        texts = (
            f"{saved.name} {saved.dtype}{list(saved.shape)} for {tensor.name} "
            f"{tensor.dtype}{list(tensor.shape)}"
            for saved, tensor in unfit
        )
        raise RefusedError(
            f"the checkpoint holds {listed(texts)}. Build the model with the sizes that were "
            "saved; where it has no fp32 values of a tensor, also with its precision."
        )
    return found


def fitted(
    source: PlacedTensors, found: Mapping[str, TensorOrigin], wanted: Mapping[str, Tensor]
) -> PlacedTensors:
    """Return the sources' pieces under an engine's names and dtypes.

    Pieces rounded in the files stay as they are.
    """
    number = {tensor.name: at for at, tensor in enumerate(source.collection.tensors)}
    by_tensor = np.argsort(source.collection.tensor, kind="stable")
    ends = np.searchsorted(source.collection.tensor[by_tensor], np.arange(len(number) + 1))
    rows, of, is_rounded = [np.zeros(0, np.int64)], [0], [False]
    for origin in found.values():
        at = number[origin.tensor.name]
        rows.append(by_tensor[ends[at] : ends[at + 1]])
        of.append(len(rows[-1]))
        is_rounded.append(origin.is_rounded)
    row, counts = np.concatenate(rows), np.array(of)
    collection = Collection(
        tuple(wanted[name] for name in found),
        np.repeat(np.arange(len(found)), counts[1:]),
        source.collection.offset[row],
        source.collection.shape[row],
    )
    rounded = source.rounded()[row] | np.repeat(np.array(is_rounded), counts)
    return PlacedTensors(
        collection, source.file[row], source.begin[row], source.stride[row], source.files, rounded
    )


def used(source: Collection, found: Mapping[str, TensorOrigin]) -> npt.NDArray[np.bool_]:
    """Return the tensors of a checkpoint related to this rank's sources, [tensors]: for a weight
    all its kinds."""
    names = {origin.tensor.name for origin in found.values()}
    weights = {split_name(name)[1] for name in names if _is_weight(name)}
    return np.array(
        [
            t.name in names or (_is_weight(t.name) and split_name(t.name)[1] in weights)
            for t in source.tensors
        ],
        dtype=bool,
    )


def listed(texts: Iterable[str]) -> str:
    """Return the first few of some texts, and how many more there are."""
    found = list(texts)
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


def _origin(source: Mapping[str, Tensor], tensor: Tensor) -> TensorOrigin | None:
    exact = source.get(tensor.name)
    if not _is_weight(tensor.name) or (exact is not None and exact.dtype == tensor.dtype):
        return None if exact is None else TensorOrigin(exact)
    name = split_name(tensor.name)[1]
    full = source.get(f"{MAIN}/{name}", source.get(f"{PARAM}/{name}"))
    if full is not None and full.dtype == _FP32 and tensor.dtype in (_FP32, *HALF):
        return TensorOrigin(full, is_rounded=tensor.dtype != _FP32)
    return None if exact is None else TensorOrigin(exact)


def _is_weight(name: str) -> bool:
    return name.startswith((f"{PARAM}/", f"{MAIN}/"))


_WAY_OUT = (
    "Build the model and the optimizer that were saved, or pass load_optimizer_states=False or "
    "load_module_strict=False where that is meant."
)


@dataclass(frozen=True, eq=False, slots=True)
class LoadPlan:
    """One rank's part of a load.

    Attributes:
        rows: The live memory to fill.
        work: Its sources.
        used: Tensors of the checkpoint used by this rank, [tensors].
        masters: Tensors under the optimizer; none if its state is not loaded.
        path: The model file for this rank.
        values: Its entries: counters, the schedule's state, the script's own.
    """

    engine: Any
    request: LoadRequest
    saved: SavedCheckpoint
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
        saved: SavedCheckpoint,
        request: LoadRequest,
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
        """Refuse a checkpoint with tensors unused by all ranks.

        ``is_used`` [tensors]: over all ranks.
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
            groups = groups_of(masters, self.engine.param_names)
            put_groups(self.saved.groups, groups)


def _is_scaled_dynamically(optimizer: Any) -> bool:
    config = getattr(optimizer, "loss_scale_config", optimizer)
    return bool(getattr(config, "dynamic_loss_scale", False))


def _kind(tensor: Tensor) -> str:
    return split_name(tensor.name)[0]


def _refuse_missing(
    wanted: Mapping[str, Tensor], found: Mapping[str, Any], *, is_strict: bool
) -> None:
    """Refuse tensors missing in the checkpoint; without strictness untrained weights may stay as
    they are."""
    missing = [name for name in wanted if name not in found]
    trained = {split_name(name)[1] for name in wanted if not name.startswith(f"{PARAM}/")}
    needed = [name for name in missing if is_strict or split_name(name)[1] in trained]
    if needed:
        raise RefusedError(
            f"the checkpoint has no {listed(needed)}, which this engine has. (Of an optimizer that "
            f"had made no step there are no moments.) {_WAY_OUT}"
        )


def _copies(masters: Sequence[Master]) -> list[Master]:
    """Return masters with copied steps and groups, to change without a trace."""
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
    """Return values with cloned tensors, of a parameter group or a step."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }
