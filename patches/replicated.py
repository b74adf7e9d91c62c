"""The live state of a plain torch model, equal on every rank: own loops with shared samples (slabs)
or data parallelism."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json, exact_json, from_exact_json
from scalai.core.messages.shared import JsonText
from scalai.patches.optimizers import Group, put_groups, take_groups, torch_state
from scalai.patches.step_proof import OwnLoop, counts_samples, norm_of_gradients
from scalai.runtime.live import Slot, whole_slot
from scalai.runtime.session import Session


class ReplicatedState:
    """Parameters, buffers and optimizer of a model, whole and equal on every rank.

    Random numbers are not carried: seed them by the session's ``step``.

    Args:
        model: The module itself, without a wrapper (``DistributedDataParallel.module``).
        optimizer: Adam, AdamW or SGD of torch. Its first-step state is made here.
        scheduler: Learning-rate schedule, if there is one.

    Raises:
        RefusedError: Unknown optimizer, or one over foreign tensors; a tensor is not contiguous;
            the scheduler has values without a JSON form.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None = None,
    ) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self.coordinate = f"rank{os.environ.get('RANK', '0')}"
        self._names = {id(value): name for name, value in model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._begin(parameter, group)
        if scheduler is not None:
            _check_carried(scheduler)

    def watch_steps(self, session: Session) -> None:
        """Tell the norm of the gradients in steps of a proof."""
        loop = OwnLoop(session, [self._model], f"torch {torch.__version__}")

        def at_the_door(*_: object) -> None:
            if loop.is_proving:
                loop.tell(norm_of_gradients(self._model))

        self._optimizer.register_step_pre_hook(at_the_door)

    @property
    def why_even(self) -> str:
        """Reason against uneven shares of the batch; empty: none."""
        return counts_samples(self._model)

    def slots(self) -> Sequence[Slot]:
        return list(self._slots())

    def _slots(self) -> Iterator[Slot]:
        persistent = self._model.state_dict().keys()
        for name, parameter in self._model.named_parameters():
            yield _slot("param", name, parameter)
        for name, buffer in self._model.named_buffers():
            if name in persistent:
                yield _slot("buffer", name, buffer, is_volatile=True)
        for trained, kept in self._optimizer.state.items():
            for kind, value in kept.items():
                if isinstance(value, torch.Tensor):
                    yield _slot(kind, self._names[id(trained)], value)

    def scalars(self) -> Mapping[str, Json]:
        schedule = _schedule(self._scheduler) if self._scheduler is not None else None
        return {"groups": take_groups(self._groups())(), "scheduler": schedule}

    def load_scalars(self, scalars: Mapping[str, Json]) -> None:
        if self._scheduler is not None and scalars["scheduler"] is not None:
            like = self._scheduler.state_dict()
            self._scheduler.load_state_dict(from_exact_json(scalars["scheduler"], like))
        # Last: a schedule may set some of it while it is loaded.
        groups = self._groups()
        put_groups(scalars["groups"], groups)

    def rank_state(self) -> Json:
        return None

    def load_rank_state(self, state: Json | None, step: int) -> str:
        return "random numbers: not carried"

    def _begin(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if id(parameter) not in self._names:
            raise RefusedError(
                f"the optimizer trains a tensor {list(parameter.shape)} that is no parameter of "
                "the model. Give the module that has it."
            )
        if self._optimizer.state.get(parameter):
            return
        made = torch_state(self._optimizer, parameter, group)
        if made is None:
            raise RefusedError(
                f"what {type(self._optimizer).__name__} keeps is not known before its first step. "
                "Use torch's Adam, AdamW or SGD, or write a state of your own (LiveState)."
            )
        if made:
            self._optimizer.state[parameter] = made

    def _groups(self) -> list[Group]:
        return [
            (group, [self._names[id(parameter)] for parameter in group["params"]])
            for group in self._optimizer.param_groups
        ]


def _schedule(scheduler: LRScheduler) -> dict[str, Json]:
    """Return the scheduler's state as JSON, or refuse it."""
    return {key: _carried(scheduler, key, kept) for key, kept in scheduler.state_dict().items()}


def _carried(scheduler: LRScheduler, key: str, kept: Any) -> Json:
    try:
        return exact_json(kept)
    except TypeError as error:
        raise _not_carried(scheduler, key, str(error)) from error


def _check_carried(scheduler: LRScheduler) -> None:
    """Check the scheduler's state after a round trip through JSON, or refuse it."""
    stated = scheduler.state_dict()
    back = from_exact_json(JsonText.of(_schedule(scheduler)).value(), stated)
    for key, kept in stated.items():
        if back[key] != kept:
            raise _not_carried(scheduler, key, f"{kept!r}, which would come back as {back[key]!r}")


def _not_carried(scheduler: LRScheduler, key: str, what: str) -> RefusedError:
    return RefusedError(
        f"{key} of {type(scheduler).__name__} is {what}, which is not carried. Use numbers, text, "
        "and lists or mappings of them; or write a state of your own (LiveState)."
    )


def _slot(kind: str, name: str, value: torch.Tensor, *, is_volatile: bool = False) -> Slot:
    if not value.is_contiguous():
        raise RefusedError(
            f"{kind}/{name} {list(value.shape)} has strides {value.stride()}: it must be "
            "contiguous (channels_last is not)."
        )
    return whole_slot(f"{kind}/{name}", value, is_volatile=is_volatile)
