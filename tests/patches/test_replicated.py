"""The state of a plain model that every rank has whole: all of it is listed, and put back."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from scalai import ReplicatedState
from scalai.core.errors import RefusedError
from scalai.core.job.function_proof import Numbers
from scalai.core.messages.shared import JsonText
from scalai.runtime.live import held_rows, piece_view, wanted_rows

Optimizer = torch.optim.Optimizer


def network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, dtype=torch.float32)
    )


Make = Callable[[torch.nn.Module], Optimizer]
OPTIMIZERS: tuple[Make, ...] = (
    lambda model: torch.optim.AdamW(model.parameters(), 0.1, betas=(0.8, 0.9), amsgrad=True),
    lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    lambda model: torch.optim.SGD(model.parameters(), 0.1),
)


def train(model: torch.nn.Module, optimizer: Optimizer, steps: int) -> None:
    random = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=random)).square().sum().backward()
        optimizer.step()


def through_json(state: ReplicatedState) -> Any:
    return JsonText.of(state.scalars()).value()


def assert_alike(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


# ------------------------------------------------------------------ what a step computes


class Proving:
    """A session that wants the numbers of a step; behind its stop, of the last one."""

    def __init__(self, *, is_last: bool) -> None:
        self.is_proving, self.is_to_prove = True, is_last
        self.numbers: list[Numbers] = []

    def note_numbers(self, numbers: Numbers) -> None:
        self.numbers.append(numbers)


def watched(model: torch.nn.Module, *, is_last: bool = False) -> tuple[torch.optim.SGD, Any]:
    """Return an optimizer of a model, and the session that is told of its steps."""
    session: Any = Proving(is_last=is_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ReplicatedState(model, optimizer).watch_steps(session)
    return optimizer, session


def test_a_loop_of_ones_own_tells_the_norm_of_its_gradients_and_behind_its_stop_updates_nothing(
) -> None:  # fmt: skip
    told = []
    for is_last in (False, True):
        model = network()
        optimizer, session = watched(model, is_last=is_last)
        weight = model.state_dict()["0.weight"]
        before = weight.clone()
        with pytest.raises(SystemExit, match=r"^0$") if is_last else nullcontext():
            train(model, optimizer, 1)
        assert torch.equal(before, weight) is is_last
        told += session.numbers
    assert told[0].norm == told[1].norm and told[0].norm is not None and not told[0].obstacle


def test_sparse_gradients_have_a_norm() -> None:
    model = torch.nn.Embedding(5, 2, sparse=True)
    optimizer, session = watched(model)
    model(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    (numbers,) = session.numbers
    assert numbers.norm == pytest.approx((2 * 2**2 + 2) ** 0.5)


def test_gradients_of_which_no_norm_is_taken_stop_no_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stumbles(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    model = network()
    optimizer, session = watched(model)
    monkeypatch.setattr(torch.linalg, "vector_norm", stumbles)
    train(model, optimizer, 1)
    assert [each.norm for each in session.numbers] == [None]
    assert "event=function_unproven" in caplog.text


def test_a_model_that_is_compiled_as_one_graph_stays_one() -> None:
    model = network()
    optimizer, session = watched(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert isinstance(compiled, torch.nn.Module)
    train(compiled, optimizer, 1)
    assert session.numbers


def test_a_forward_pass_that_draws_random_numbers_is_told_of() -> None:
    model = torch.nn.Sequential(network(), torch.nn.Dropout(0.1))
    optimizer, session = watched(model)
    train(model, optimizer, 1)
    assert "random" in session.numbers[0].obstacle


# ------------------------------------------------------------------ what is refused


def strided() -> torch.nn.Module:
    return torch.nn.Conv3d(2, 2, 3).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("build", "make", "said"),
    [
        (network, torch.optim.RMSprop, "what RMSprop keeps is not known"),
        (
            network, lambda _: torch.optim.Adam(network().parameters()),
            r"trains a tensor \[3, 4\] that is no parameter of",
        ),
        (strided, torch.optim.SGD, r"param/weight .* has strides .* must be contiguous"),
    ],
    ids=["an unknown optimizer", "foreign parameters", "strided memory"],
)  # fmt: skip
def test_an_optimizer_or_memory_that_cannot_be_carried_is_refused(
    build: Callable[[], torch.nn.Module], make: Callable[[Any], Optimizer], said: str
) -> None:
    model = build()
    with pytest.raises(RefusedError, match=said):
        ReplicatedState(model, make(model.parameters())).slots()


class Keeping(schedulers.StepLR):
    """A scheduler that keeps one more value."""

    def __init__(self, optimizer: Optimizer, kept: object) -> None:
        self.kept = kept
        super().__init__(optimizer, 2)


@pytest.mark.parametrize("kept", [torch.ones(2), {(1, 2): {3}}, float("nan")])
def test_a_scheduler_with_what_would_not_come_back_the_same_is_refused(kept: object) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(RefusedError, match=r"kept of Keeping is .*, which is not carried"):
        ReplicatedState(model, optimizer, Keeping(optimizer, kept))


# ------------------------------------------------------------------ what is promised


def test_a_learning_rate_that_is_a_tensor_keeps_its_place_and_is_carried() -> None:
    states, rates = [], (torch.tensor(0.1), torch.tensor(0.7))
    for rate in rates:
        model = network()
        states.append(ReplicatedState(model, torch.optim.Adam(model.parameters(), rate)))
    states[1].load_scalars(through_json(states[0]))
    assert rates[1] == rates[0]


class Anew(schedulers.StepLR):
    """A scheduler that sets the rates anew while it is loaded."""

    def load_state_dict(self, state: dict[str, object]) -> None:
        super().load_state_dict(state)
        for group in self.optimizer.param_groups:
            group["lr"] = 9.0


@pytest.mark.fault
def test_groups_come_back_by_their_parameters_whatever_their_order_and_the_scheduler_says() -> None:
    """A scheduler that sets the rates while it is loaded has not the last word."""
    states, optimizers = [], []
    for order in (1, -1):
        model = network()
        groups = [{"params": [p]} for p in model.parameters()][::order]
        optimizer = torch.optim.AdamW(groups, 0.1)
        states.append(ReplicatedState(model, optimizer, Anew(optimizer, 2)))
        optimizers.append(optimizer)
    for number, group in enumerate(optimizers[0].param_groups):
        group.update(lr=0.1 * number, betas=(0.5, 0.6), weight_decay=0.2)
    states[1].load_scalars(through_json(states[0]))
    kept, back = (
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    )
    assert back[::-1] == kept


SCHEDULES: tuple[Callable[[Optimizer], schedulers.LRScheduler], ...] = (
    lambda by: schedulers.MultiStepLR(by, [3, 6, 6]),
    lambda by: schedulers.SequentialLR(
        by, [schedulers.LinearLR(by), schedulers.MultiStepLR(by, [2, 4])], [2]
    ),
    lambda by: schedulers.ChainedScheduler(
        [schedulers.MultiStepLR(by, [4]), schedulers.ExponentialLR(by, 0.9)]
    ),
    lambda by: schedulers.OneCycleLR(by, 0.1, total_steps=20),
    lambda by: schedulers.CyclicLR(by, 0.1, 1.0),
    lambda by: schedulers.LambdaLR(by, lambda step: 1 / (step + 1)),
    lambda by: schedulers.CosineAnnealingWarmRestarts(by, 5),
)


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("until", [0, 1, 4])
def test_a_schedule_goes_on_over_a_change(
    make: Callable[[Optimizer], schedulers.LRScheduler], until: int
) -> None:
    def begin() -> tuple[Optimizer, schedulers.LRScheduler, ReplicatedState]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
        schedule = make(optimizer)
        return optimizer, schedule, ReplicatedState(model, optimizer, schedule)

    rates: list[list[object]] = []
    for change in (None, until):
        optimizer, schedule, state = begin()
        rates.append([])
        for step in range(9):
            if step == change:
                saved = through_json(state)
                optimizer, schedule, state = begin()
                state.load_scalars(saved)
            optimizer.step()
            schedule.step()
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_what_is_put_back_trains_on_as_if_nothing_had_happened(make: Make) -> None:
    """And what is made before the first step changes nothing."""
    plain, jobs = network(), list[tuple[Any, Any, Any, ReplicatedState]]()
    for _ in range(2):
        model = network()
        optimizer = make(model)
        schedule = schedulers.StepLR(optimizer, 2)
        jobs.append((model, optimizer, schedule, ReplicatedState(model, optimizer, schedule)))
    (model, optimizer, schedule, state), (other, of_other, _, target) = jobs
    train(model, optimizer, 3)
    train(plain, make(plain), 3)
    assert_alike(model, plain)
    schedule.step()
    held, wanted = held_rows(state.slots()), wanted_rows(target.slots())
    assert [slot.tensor for slot, _ in held] == [slot.tensor for slot, _ in wanted]
    for one, two in zip(held, wanted, strict=True):
        piece_view(*two).copy_(piece_view(*one))
    target.load_scalars(state.scalars())
    for trained, by, with_schedule, _ in jobs:
        train(trained, by, 4)
        with_schedule.step()
    assert optimizer.param_groups[0]["lr"] == of_other.param_groups[0]["lr"] < 0.1
    assert_alike(model, other)


def test_a_tied_weight_is_listed_once_and_what_is_frozen_is_too() -> None:
    model = network()
    model.add_module("again", model[0])
    model[2].requires_grad_(False)
    trained = [value for value in model.parameters() if value.requires_grad]
    slots = ReplicatedState(model, torch.optim.Adam(trained)).slots()
    names = [slot.tensor.name for slot in slots]
    assert len(names) == len(set(names)) and "param/2.weight" in names
    assert "exp_avg/2.weight" not in names and "step/0.weight" in names
    assert {slot.tensor.name for slot in slots if slot.is_volatile} == {
        "buffer/1.running_mean", "buffer/1.running_var", "buffer/1.num_batches_tracked",
    }  # fmt: skip
