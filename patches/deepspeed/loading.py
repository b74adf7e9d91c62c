"""``engine.load_checkpoint`` at other degrees or another ZeRO stage than the checkpoint's.

DeepSpeed loads its own layouts, untouched. For others every rank reads its pieces of the files into
its own live memory. Nothing is written before all ranks have agreed on the whole load.

    engine, *_ = deepspeed.initialize(...)
    scalai.patches.deepspeed.loading.install(engine)
    path, client_state = engine.load_checkpoint(directory)
"""

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scalai.core.errors import RefusedError
from scalai.patches.deepspeed import parallel_ranks
from scalai.patches.deepspeed.checkpoint.agreement import EngineRanks, ranks_of
from scalai.patches.deepspeed.checkpoint.filling import (
    check_proofs,
    check_storages,
    fill,
    proof,
    share,
    touched,
)
from scalai.patches.deepspeed.checkpoint.load_plan import LoadPlan
from scalai.patches.deepspeed.checkpoint.model_file import (
    LoadRequest,
    client_state,
    is_out_of_scope,
    loads_itself,
)
from scalai.patches.deepspeed.checkpoint.saved_checkpoint import SavedCheckpoint, read_saved
from scalai.patches.deepspeed.deepspeed_state import DeepSpeedState
from scalai.patches.deepspeed.masters import order_here, order_of

log = logging.getLogger(__name__)

Loaded = tuple[str | None, dict[str, Any] | None]


def install(engine: Any, cuts: str | None = None) -> None:
    """Let the ``load_checkpoint`` of one engine take checkpoints of other degrees and stages.

    Call it with the engine of ``deepspeed.initialize``, on all ranks; no launcher is needed.

    Args:
        cuts: As ``scalai reshard --cuts``, for tensor-parallel checkpoints without their cuts.
    """
    method = engine.load_checkpoint

    @functools.wraps(method)
    def load(*args: Any, **kwargs: Any) -> Loaded:
        own = functools.partial(method, *args, **kwargs)
        return _load_checkpoint(engine, own, LoadRequest.of(method, args, kwargs), cuts)

    engine.load_checkpoint = load


def _load_checkpoint(
    engine: Any, own: Callable[[], Loaded], request: LoadRequest, cuts: str | None
) -> Loaded:
    """Load a checkpoint of any degrees and stage. All ranks.

    Args:
        own: DeepSpeed's own ``load_checkpoint`` with the request's arguments.

    Returns:
        As DeepSpeed: the path of a model file, and the script's ``client_state``.

    Raises:
        RefusedError: On all ranks, if one cannot load; the engine is as it was.
        ProofError, StoreError: On all ranks, if a file is unreadable or the loaded memory differs.
            The message says if the engine's state is spoilt.
    """
    if is_out_of_scope(engine):
        return own()
    ranks, directory = ranks_of(engine), request.directory()
    is_own = ranks.together(lambda: directory is None or loads_itself(engine, directory, request))
    if not ranks.any_of(np.array([not is_own]))[0]:
        return own()
    return _load_pieces(ranks, engine, ranks.together(lambda: _seen(directory)), request, cuts)


def _seen(directory: Path | None) -> Path:
    if directory is None:
        raise RefusedError(
            "this rank sees no checkpoint where others do. Put it on a disk that all hosts share."
        )
    return directory


def _load_pieces(
    ranks: EngineRanks, engine: Any, directory: Path, request: LoadRequest, cuts: str | None
) -> Loaded:
    # A fresh optimizer gets the state that its first step would make.
    slots = ranks.together(lambda: DeepSpeedState(engine).slots())
    here = ranks.together(lambda: json.dumps(order_here(engine)).encode())
    order = order_of([json.loads(of) for of in ranks.to_first(here)])
    saved = SavedCheckpoint.from_bytes(
        ranks.from_first(
            lambda: read_saved(directory, cuts, order, is_whole=request.is_whole).to_bytes()
        )
    )
    plan = ranks.together(lambda: LoadPlan.of(engine, directory, saved, request, slots))
    plan.refuse_left_over(ranks.any_of(plan.used))
    _check_storages(ranks, directory, saved, plan)
    _event(engine, "checkpoint_event_prologue")  # stage 3 lets go of what is gathered
    prints = ranks.together(lambda: fill(directory, plan.work, plan.rows))
    proofs = ranks.to_first(proof(plan.rows, prints))
    source = saved.placed.collection
    ranks.together(lambda: check_proofs(directory, source, proofs) if proofs else None)
    ranks.together(plan.put_scalars)
    _event(engine, "checkpoint_event_epilogue")
    if ranks.rank == 0:
        log.warning(
            "event=load framework=deepspeed checkpoint=%s dp=%s->%s tp=%d pp=%d zero_stage=%d "
            "tensors=%d", directory, plan.values["dp_world_size"], *_degrees(engine),
            engine.zero_optimization_stage(), len(source.tensors),
        )  # fmt: skip
    return str(plan.path), client_state(plan.values, request)


def _check_storages(
    ranks: EngineRanks, directory: Path, saved: SavedCheckpoint, plan: LoadPlan
) -> None:
    """Compare the bytes to read with their checksums, each rank a share."""
    if not saved.storages:
        return  # written without checksums
    is_read = ranks.any_of(touched(saved.storages, plan.work.source))
    stored = [saved.storages[at] for at in np.flatnonzero(is_read).tolist()]
    own = share(stored, ranks.rank, ranks.world_size)
    ranks.together(lambda: check_storages(directory, own, saved.placed))


def _event(engine: Any, name: str) -> None:
    if hasattr(engine.optimizer, name):
        getattr(engine.optimizer, name)()


def _degrees(engine: Any) -> tuple[int, int, int]:
    here = parallel_ranks.degrees(engine)
    return here["dp"], here["tp"], here["pp"]
