"""DeepSpeed's own checkpoints in an elastic job: the newer of generation and checkpoint wins.

A script of a later round runs from its beginning, so ``load_checkpoint`` tells it what it told the
first round: it then goes through the same epochs, of which the consumed ones yield nothing.
"""

import functools
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed

from scalai.patches.data.clock import Clocks
from scalai.patches.deepspeed.progress import (
    DEEPSPEEDS_OWN,
    checkpoint_step,
    checkpoint_tag,
    client_state,
)
from scalai.patches.progress import choose_source, describe_source
from scalai.runtime.live import Json, LiveState

log = logging.getLogger(__name__)
NO_CHECKPOINT = -1
"""Stands for "no checkpoint" where a number has to be agreed on."""


class Renewable(Protocol):
    """What a load needs of the session."""

    step: int

    def renew(self, state: LiveState, *, step: int, samples: int) -> None:
        """Say that the framework has loaded a checkpoint of its own."""


class Checkpoints:
    """What ``load_checkpoint`` and ``save_checkpoint`` of one engine do.

    Args:
        engine: The engine that takes part.
        session: This worker's session.
        clocks: How far the data is.
    """

    def __init__(self, engine: Any, session: Renewable, clocks: Clocks) -> None:
        self._engine, self._session, self._clocks = engine, session, clocks
        self._restored_step: int | None = None
        self._told: Json = None
        """Path and client state that the first round was told; None: it did not ask."""

    def install(self, *, is_restored: bool) -> None:
        """Hook the engine, once it has what it goes on from."""
        if is_restored:
            self._restored_step = self._session.step
        for name, hook in (("load_checkpoint", self._load), ("save_checkpoint", self._save)):
            method = getattr(self._engine, name)
            setattr(self._engine, name, functools.wraps(method)(functools.partial(hook, method)))

    def take(self) -> Json:
        return self._told

    def put(self, told: Json) -> None:
        self._told = told

    def _load(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Load a checkpoint that is newer than the restored generation; else leave it."""
        from scalai.patches.deepspeed.state import DeepSpeedState

        given = inspect.signature(method).bind(*args, **kwargs).arguments
        load_dir, engine = str(given["load_dir"]), self._engine
        latest = "latest_universal" if engine.load_universal_checkpoint() else "latest"
        tag = checkpoint_tag(load_dir, given.get("tag"), latest)
        if self._restored_step is not None:
            is_whole = not given.get("load_module_only") and given.get(
                "load_optimizer_states", True
            )
            # Weights alone are where a training began, not where it is.
            step = checkpoint_step(load_dir, tag) if tag is not None and is_whole else None
            step = _agreed(step)
            source = choose_source(self._restored_step, step)
            if torch.distributed.get_rank() == 0:
                log.warning(describe_source(source, self._restored_step, step, load_dir))
            if source == "generation":
                return self._as_the_first_round(load_dir, tag)
        path, client = method(*args, **kwargs)
        self._told = [path, _plain(client or {})]
        if path is not None:
            self._restored_step = None
            self._clocks.put([])
            self._session.renew(
                DeepSpeedState(engine), step=engine.global_steps, samples=engine.global_samples
            )
        return path, client

    def _as_the_first_round(self, load_dir: str, tag: str | None) -> tuple[Any, Any]:
        """Return what the first round was told. Where it did not ask, because there was nothing to
        load yet, what the checkpoint says beside the state."""
        if self._told is None:
            return (None, {}) if tag is None else (load_dir, client_state(load_dir, tag))
        path, client = self._told
        return path, client

    def _save(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Save, but not while the script goes through epochs that are over: what it would save
        under their names is of a later step."""
        if self._clocks.is_replaying:
            log.info("event=save skipped='this epoch was trained on in an earlier round'")
            return True
        return method(*args, **kwargs)


def _agreed(step: int | None) -> int | None:
    """Return the newest step that any rank sees. A collective."""
    device = torch.device("cuda", torch.cuda.current_device()) if _on_cuda() else "cpu"
    told = torch.tensor([NO_CHECKPOINT if step is None else step], device=device)
    torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX)
    found = int(told.item())
    return None if found == NO_CHECKPOINT else found


def _on_cuda() -> bool:
    return torch.distributed.get_backend() == "nccl"


def _plain(client: Mapping[str, Any]) -> dict[str, Json]:
    """Return what can be carried as JSON of what a script saved beside the state."""
    kept = {}
    for name, value in client.items():
        if name in DEEPSPEEDS_OWN:
            continue
        try:
            kept[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            log.warning("event=client_state dropped=%s: it is not JSON", name)
    return kept
