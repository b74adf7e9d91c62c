"""DeepSpeed's own checkpoints in an elastic job, and states that it offloads.

A script of a later round runs from its beginning. A load at its beginning is its resume: the newer
of generation and checkpoint wins, and ``load_checkpoint`` returns what it returned in the first
round, so the script goes through the same epochs, of which the consumed ones yield nothing. A load
behind those epochs happened in an earlier round. From the round's first step on loads are real.

While states are offloaded (``engine.offload_states()``) nothing is written, and once they are back
they lie elsewhere.

Source: deepspeed/runtime/engine.py and runtime/zero/offload_states.py, 0.19.8.
"""

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scalai.core.jsonable import Json
from scalai.patches.continuation import choose_source, describe_source
from scalai.patches.data.clock import Clocks
from scalai.patches.deepspeed import loading
from scalai.patches.deepspeed.beside_engine import Auxiliary
from scalai.patches.deepspeed.checkpoint.agreement import ranks_of
from scalai.patches.deepspeed.checkpoint.model_file import (
    LoadRequest,
    client_state_of,
    plain_client_state,
    saved_step,
)
from scalai.patches.deepspeed.record import LOADS
from scalai.patches.deepspeed.replay import Replay
from scalai.patches.hooking import given_to
from scalai.runtime.session import Session

log = logging.getLogger(__name__)

Loaded = tuple[Any, Any]

REMEMBERED = 100
"""Newest checkpoints with known finished epochs."""


class Checkpoints:
    """``load_checkpoint``, ``save_checkpoint`` and ``reload_states`` of one engine.

    Args:
        clocks: Position in the data.
        replay: Position of a pipeline's script.
        beside: State and actions of the script beside the engine.
        on_load: Called once a checkpoint is loaded.
    """

    def __init__(
        self, engine: Any, session: Session, clocks: Clocks, replay: Replay, beside: Auxiliary,
        on_load: Callable[[], None],
    ) -> None:  # fmt: skip
        self._engine, self._session = engine, session
        self._clocks, self._replay, self._auxiliary = clocks, replay, beside
        self._on_load = on_load
        self._told: dict[str, Any] = {}
        """Path and client state returned in the first round, by request."""
        self._over: dict[str, Json] = {}
        """Finished passes at each save, by directory of the checkpoint."""

    def install(self) -> None:
        """Hook the engine, once its state is restored."""
        loading.install(self._engine, self._session.settings.get("cuts"))
        hooks = {
            "load_checkpoint": self._load,
            "save_checkpoint": self._save,
            "reload_states": self._reload,  # from 0.15 on
        }
        for name, hook in hooks.items():
            if (method := getattr(self._engine, name, None)) is not None:
                hooked = functools.wraps(method)(functools.partial(hook, method))
                setattr(self._engine, name, hooked)

    def take(self) -> Json:
        return {"told": self._told, "over": self._over}

    def put(self, saved: Mapping[str, Any]) -> None:
        self._told = dict(saved["told"])
        self._over = dict(saved["over"])

    def _load(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Loaded:
        """Load. At the script's beginning only a checkpoint newer than the restored generation is
        loaded."""
        from scalai.patches.deepspeed.deepspeed_state import DeepSpeedState

        auxiliary, request = self._auxiliary, LoadRequest.of(method, args, kwargs)
        auxiliary.record.note(f"{LOADS} {_kind(request.tag or request.load_dir)}")
        if auxiliary.is_resuming:
            directory = request.directory()
            if self._clocks.have_begun:
                log.warning("event=load skipped='it was loaded in an earlier round' load=%s",
                            request.load_dir)  # fmt: skip
                return (None, {}) if directory is None else _told_by(directory)
            if self._is_generation_newer(request, directory):
                return self._as_the_first_round(request, directory)
        is_beginning = not auxiliary.has_stepped
        self._session.begin_update()
        path, client = method(*args, **kwargs)
        if is_beginning:
            self._told[_asked(request)] = [path, plain_client_state(client or {})]
        if path is not None:
            engine = self._engine
            if is_beginning:  # later it moves neither the script nor its data
                self._clocks.put([])
                self._replay.restart()
                auxiliary.record.restart()
            auxiliary.loaded()
            self._on_load()
            self._session.renew(
                DeepSpeedState(engine), step=engine.global_steps, samples=engine.global_samples
            )
        return path, client

    def _is_generation_newer(self, request: LoadRequest, directory: Path | None) -> bool:
        """True to stay at the restored generation, by rank 0's files. A collective."""
        ranks = ranks_of(self._engine)
        # Weights alone are where a training began, not where it is.
        whole = directory if request.is_whole else None
        step = json.loads(ranks.from_first(lambda: json.dumps(_step_of(whole)).encode()))
        restored = self._session.step
        source = choose_source(restored, step)
        if ranks.rank == 0:
            log.warning(describe_source(source, restored, step, request.load_dir))
        return source == "generation"

    def _as_the_first_round(self, request: LoadRequest, directory: Path | None) -> Loaded:
        """Return the first round's answer. If it did not ask, because there was no checkpoint yet,
        the checkpoint's own client state."""
        told = self._told.get(_asked(request))
        if told is not None:
            path, client = told
            return path, client
        if directory is None:
            return None, {}
        if request.is_whole:
            # The script goes on behind the epochs and steps that were over, not with its first.
            self._auxiliary.record.resume()
            self._clocks.begin_after(self._over.get(_name(directory), []))
            self._replay.begin_at(saved_step(directory))
        return _told_by(directory)

    def _save(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Save, but not in epochs or steps of earlier rounds: the state under their names would be
        of a later step."""
        given = given_to(method, args, kwargs)
        self._auxiliary.record.note(f"a save of {_kind(given.get('tag') or given['save_dir'])}")
        if self._auxiliary.is_behind():
            log.info("event=save skipped='this was trained on in an earlier round'")
            return True
        self._session.await_proof()
        result = method(*args, **kwargs)
        tag = given.get("tag") or f"global_step{self._engine.global_steps}"
        name = _name(Path(given["save_dir"]) / str(tag))
        self._over[name] = self._clocks.over()
        self._auxiliary.saves(name)
        for name in list(self._over)[:-REMEMBERED]:
            del self._over[name]
        return result

    def _reload(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        from scalai.patches.deepspeed.deepspeed_state import DeepSpeedState

        was_away, session = _is_away(self._engine), self._session
        method(*args, **kwargs)
        if was_away:
            state = DeepSpeedState(self._engine)
            session.renew(state, step=session.step, samples=session.consumed_samples)


def _is_away(engine: Any) -> bool:
    return bool(getattr(engine.optimizer, "offloaded_states", None))


def _kind(name: Any) -> str:
    """Return a checkpoint's name without its numbers."""
    return re.sub(r"\d+", "#", Path(str(name)).name)


def _asked(request: LoadRequest) -> str:
    return f"{request.load_dir}/{request.tag or ''}"


def _told_by(directory: Path) -> Loaded:
    return str(directory), client_state_of(directory)


def _name(directory: Path) -> str:
    return str(directory.resolve())


def _step_of(directory: Path | None) -> int | None:
    return None if directory is None else saved_step(directory)
