"""A further pass draws no random numbers, and nothing remembers it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalai.patches.continuation import continue_host_rng, host_rng_state
from scalai.patches.step_proof import RepeatedBatches, bare_pass


class Model(torch.nn.Module):
    """Counts its passes, and draws by a module, by a rate that it has copied, and by its
    configuration's; ``noise`` is nobody's that is known."""

    passes: torch.Tensor

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_dropout=0.5, moe_input_jitter_eps=0.1)
        self.layer = torch.nn.Linear(4, 4)
        self.drop = torch.nn.Dropout(0.5)
        self.dropout_rate = 0.5
        self.noise = noise
        self.dropped = torch.zeros(3), [torch.ones(3)]
        self.drop_table = torch.ones(3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        x = torch.nn.functional.dropout(self.drop(self.layer(x)), self.dropout_rate)
        x = torch.nn.functional.dropout(x, self.config.hidden_dropout)
        if self.config.moe_input_jitter_eps is not None:
            x = x * torch.rand(x.shape)
        return x + torch.rand(x.shape) if self.noise else x


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_draws_is_off_and_what_still_draws_is_told_and_undone(noise: float) -> None:
    model, x = Model(noise), torch.ones(2, 4)
    before = host_rng_state()
    table: dict[str, Any] = {"seen": [1], "scale": torch.ones(2)}
    scale = table["scale"]
    with bare_pass([model], host_rng_state, continue_host_rng, [table]) as drawn:
        first, second = model(x), model(x)
        table["seen"].append(2)
        table["new"] = 3
        scale.mul_(2)
    assert bool(drawn.found) is bool(noise) is not torch.equal(first, second)
    assert host_rng_state() == before and model.passes == 0
    assert table["seen"] == [1] and "new" not in table
    assert table["scale"] is scale and scale.tolist() == [1, 1]
    assert (model.drop.p, model.dropout_rate, model.config.hidden_dropout) == (0.5, 0.5, 0.5)
    assert model.config.moe_input_jitter_eps == 0.1


def test_a_pass_that_fails_leaves_no_trace_either() -> None:
    model = Model(0.1)
    before = host_rng_state()
    with pytest.raises(RuntimeError):
        with bare_pass([model], host_rng_state, continue_host_rng, []):
            model(torch.ones(2, 4))
            model(torch.ones(2, 5))
    assert host_rng_state() == before and model.passes == 0 and model.drop.p == 0.5


def test_micro_batches_are_read_once_and_what_a_pass_does_to_them_is_its_own() -> None:
    read = []

    def source() -> Any:
        for number in range(9):
            read.append(number)
            yield {"number": torch.tensor(number)}

    batches = RepeatedBatches(source())
    batches.prime()
    assert read == [0]
    for _ in range(2):
        for expected in range(3):
            batch = next(batches)
            assert batch.pop("number").add_(100) == 100 + expected
        batches.rewind(is_copying=True)
    for _ in range(2):  # a framework that makes a step again
        batches.rewind(is_copying=False)
        assert [int(next(batches)["number"]) for _ in range(3)] == [0, 1, 2]
    assert read == [0, 1, 2]
