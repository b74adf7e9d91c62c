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


def network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, dtype=torch.float32)
    )


Make = Callable[[torch.nn.Module], torch.optim.Optimizer]
OPTIMIZERS: tuple[Make, ...] = (
    lambda model: torch.optim.AdamW(model.parameters(), 0.1, betas=(0.8, 0.9), amsgrad=True),
    lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    lambda model: torch.optim.SGD(model.parameters(), 0.1),
)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    random = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=random)).square().sum().backward()
        optimizer.step()


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


def test_an_optimizer_whose_state_is_not_known_is_refused() -> None:
    model = network()
    with pytest.raises(RefusedError, match="what RMSprop keeps is not known"):
        ReplicatedState(model, torch.optim.RMSprop(model.parameters()))


def test_a_parameter_that_is_not_the_models_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"trains a tensor \[3, 4\] that is no parameter of"):
        ReplicatedState(network(), torch.optim.Adam(network().parameters()))


def test_memory_that_is_not_contiguous_is_refused() -> None:
    model = torch.nn.Conv3d(2, 2, 3).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    with pytest.raises(RefusedError, match=r"param/weight .* has strides .* must be contiguous"):
        ReplicatedState(model, torch.optim.SGD(model.parameters())).slots()


def test_a_learning_rate_that_is_a_tensor_keeps_its_place_and_is_carried() -> None:
    states, rates = [], []
    for rate in (torch.tensor(0.1), torch.tensor(0.7)):
        model = network()
        states.append(ReplicatedState(model, torch.optim.Adam(model.parameters(), rate)))
        rates.append(rate)
    states[1].load_scalars(JsonText.of(states[0].scalars()).value())
    assert rates[1] == rates[0]


@pytest.mark.fault
def test_groups_come_back_by_their_parameters_whatever_their_order_and_the_scheduler_says() -> None:
    """A scheduler that sets the rates while it is loaded has not the last word."""
    states, optimizers = [], []
    for order in (1, -1):
        model = network()
        groups = [{"params": [p]} for p in model.parameters()][::order]
        optimizer = torch.optim.AdamW(groups, 0.1)
        states.append(ReplicatedState(model, optimizer, Anew(optimizer)))
        optimizers.append(optimizer)
    for number, group in enumerate(optimizers[0].param_groups):
        group.update(lr=0.1 * number, betas=(0.5, 0.6), weight_decay=0.2)
    states[1].load_scalars(JsonText.of(states[0].scalars()).value())
    kept, back = (
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    )
    assert back[::-1] == kept


class Anew(schedulers.StepLR):
    """A scheduler that sets the rates anew while it is loaded."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, 2)

    def load_state_dict(self, state: dict[str, object]) -> None:
        super().load_state_dict(state)
        for group in self.optimizer.param_groups:
            group["lr"] = 9.0


class Keeping(schedulers.StepLR):
    """A scheduler that keeps one more value."""

    def __init__(self, optimizer: torch.optim.Optimizer, kept: object) -> None:
        self.kept = kept
        super().__init__(optimizer, 2)


@pytest.mark.parametrize("kept", [torch.ones(2), {(1, 2): {3}}, float("nan")])
def test_a_scheduler_with_what_would_not_come_back_the_same_is_refused(kept: object) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(RefusedError, match=r"kept of Keeping is .*, which is not carried"):
        ReplicatedState(model, optimizer, Keeping(optimizer, kept))


# ------------------------------------------------------------------ what is promised


SCHEDULES: tuple[Callable[[torch.optim.Optimizer], schedulers.LRScheduler], ...] = (
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
    make: Callable[[torch.optim.Optimizer], schedulers.LRScheduler], until: int
) -> None:
    def begin() -> tuple[torch.optim.Optimizer, schedulers.LRScheduler, ReplicatedState]:
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
                saved = JsonText.of(state.scalars()).value()
                optimizer, schedule, state = begin()
                state.load_scalars(saved)
            optimizer.step()
            schedule.step()
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_what_is_put_back_trains_on_as_if_nothing_had_happened(make: Make) -> None:
    model, other = network(), network()
    optimizer, of_other = make(model), make(other)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    of_schedule = torch.optim.lr_scheduler.StepLR(of_other, 2)
    state = ReplicatedState(model, optimizer, schedule)
    train(model, optimizer, 3)
    schedule.step()
    target = ReplicatedState(other, of_other, of_schedule)
    held, wanted = held_rows(state.slots()), wanted_rows(target.slots())
    assert [slot.tensor for slot, _ in held] == [slot.tensor for slot, _ in wanted]
    for one, two in zip(held, wanted, strict=True):
        piece_view(*two).copy_(piece_view(*one))
    target.load_scalars(state.scalars())
    for trained, by, with_schedule in (
        (model, optimizer, schedule), (other, of_other, of_schedule),
    ):  # fmt: skip
        train(trained, by, 4)
        with_schedule.step()
    assert optimizer.param_groups[0]["lr"] == of_other.param_groups[0]["lr"] < 0.1
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_what_is_made_before_the_first_step_changes_nothing() -> None:
    for make in OPTIMIZERS:
        model, plain = network(), network()
        optimizer, by = make(model), make(plain)
        ReplicatedState(model, optimizer)
        train(model, optimizer, 3)
        train(plain, by, 3)
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name


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
