"""Uneven shares under Megatron-LM: its own calculator counts the whole batch, every sample of a
step is drawn once, and each micro-batch counts alike in gradients and logs."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scalai.core.degrees.batches import BatchRamp, Shares
from scalai.core.errors import RefusedError
from scalai.patches.megatron import shares

COUNTS, SIZES = st.integers(1, 40), st.integers(1, 9)


@settings(deadline=None)
@given(COUNTS, SIZES, SIZES)
def test_the_calculator_of_megatron_counts_the_whole_batch(batch: int, micro: int, dp: int) -> None:
    assume(batch >= dp)
    calculator = _calculator(batch * micro, micro, dp, None)
    passes = calculator.get()
    assert passes == -(-batch // dp) == len(range(passes))
    assert micro * dp * passes == dp * micro * passes == passes * micro * dp == batch * micro
    assert 1 / passes == pytest.approx(dp / batch)  # a mean over micro-batches, of all replicas
    assert calculator.get_current_running_global_batch_size() == batch * micro


def test_a_growing_batch_has_the_sizes_of_one_replica() -> None:
    ramp = [4, 4, 40]
    of_one: list[int] = []
    of_three: list[int] = []
    for found, dp in ((of_one, 1), (of_three, 3)):
        calculator, consumed = _calculator(16, 2, dp, ramp), 0
        while consumed < 200:
            calculator.update(consumed, consistency_check=True)
            found.append(int(2 * dp * calculator.get()))
            assert found[-1] == BatchRamp(4, 4, 40, 16).size_at(consumed)
            consumed += found[-1]
    assert of_three == of_one and len(set(of_one)) == 4


def _calculator(batch: int, micro: int, dp: int, ramp: list[int] | None) -> Any:
    spec = importlib.util.find_spec("megatron.core.num_microbatches_calculator")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shares._hook_calculator(module)
    module.init_num_microbatches_calculator(0, ramp, batch, micro, dp)
    return module._GLOBAL_NUM_MICROBATCHES_CALCULATOR


@given(COUNTS, SIZES, SIZES, st.integers(0, 100))
def test_replicas_draw_each_sample_of_a_step_once(
    count: int, micro: int, dp: int, consumed: int
) -> None:
    steps = shares.UnevenSteps(BatchRamp(count * micro, 1, 0, count * micro), dp)
    if count < dp:
        with pytest.raises(RefusedError, match=f"{count} micro-batches are too few for dp={dp}"):
            next(shares.micro_batches(_sampler(consumed, micro, 0, 10**6), steps))
        return
    end = consumed + 3 * count * micro
    drawn = [
        [*shares.micro_batches(_sampler(consumed, micro, rank, end + micro - 1), steps)]
        for rank in range(dp)
    ]
    real = [[row for row in each if type(row) is list] for each in drawn]
    assert sorted(place for each in real for row in each for place in row) == [
        *range(consumed, end)
    ]
    passes = Shares(count, dp).passes
    for rank, each in enumerate(drawn):
        assert len(each) == 3 * passes
        for step in range(3):
            *others, last = each[step * passes : (step + 1) * passes]
            is_filler = Shares(count, dp).of_replica(rank) < passes
            assert isinstance(last, shares.Filler) == is_filler
            assert all(type(row) is list for row in others) and (not is_filler or last == others[0])


def _sampler(consumed: int, micro: int, rank: int, total: int) -> Any:
    return SimpleNamespace(
        consumed_samples=consumed, micro_batch_size=micro, data_parallel_rank=rank,
        total_samples=total,
    )  # fmt: skip


class _Training:
    """The parts of ``megatron.training.training`` behind a step's passes, for micro-batches with
    the losses ``values`` over two replicas."""

    def __init__(self, values: list[float], **flags: Any) -> None:
        self.values, self.replica = values, 0
        self.config = SimpleNamespace(
            finalize_model_grads_func=lambda model, tokens: None,
            calculate_per_token_loss=flags.get("per_token", False),
        )
        self._job = SimpleNamespace(
            micro_batch_size=1, data_parallel_size=2, global_batch_size=len(values), **flags
        )
        self.gradient, self.step = torch.zeros(()), torch.zeros(())
        """Of all replicas, and of the present one's step."""
        chunk: Any = torch.nn.Module()
        chunk.scale_gradients = self.step.mul_
        self.model = [chunk]
        self.tokens = torch.zeros((), dtype=torch.int)

    def get_args(self) -> Any:
        return self._job

    def get_model_config(self, model: Any) -> Any:
        return self.config

    def passes(self, is_pair: bool, is_training: bool = True) -> Any:
        """Make this replica's passes as its sampler and ``schedules.py`` do."""
        mine = self.values[self.replica :: 2]
        drawn = iter([*mine, mine[0]])

        def loss(output: torch.Tensor) -> Any:
            report = {
                "lm loss": torch.stack((output.detach(), torch.ones(()))) if is_pair else output
            }
            return (output, torch.tensor(1), report) if is_pair else (output, report)

        def forward(iterator: Any, model: Any) -> Any:
            return torch.tensor(next(iterator)), loss

        def make(forward_step_func: Any, model: Any, num_microbatches: int, **rest: Any) -> Any:
            assert type(num_microbatches) is int and num_microbatches == 3
            reports = []
            for _ in range(num_microbatches):
                output, loss_of = forward_step_func(drawn, model[0])
                value, *tokens, report = loss_of(output)
                if self.config.calculate_per_token_loss:
                    self.tokens += tokens[0]
                else:
                    value = value / num_microbatches
                if is_training:
                    self.step += value
                reports.append(report)
            if is_training:
                self.config.finalize_model_grads_func(model, None)
            self.gradient += self.step
            self.step.zero_()
            return reports

        return shares._passes(
            self, make, forward_step_func=forward, model=self.model,
            forward_only=not is_training, num_microbatches=shares.PassCount.of(5, 2),
        )  # fmt: skip


VALUES = [1.0, 2.0, 4.0, 8.0, 16.0]


@pytest.mark.parametrize(("is_pair", "per_token"), [(False, False), (True, False), (True, True)])
def test_each_micro_batch_counts_alike(
    is_pair: bool, per_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five micro-batches over two replicas have the gradient and the log of one replica's five."""
    training = _Training(VALUES, per_token=per_token)
    monkeypatch.setattr(shares, "_replica", lambda: training.replica)
    finalize, logged = training.config.finalize_model_grads_func, []
    for training.replica in (0, 1):
        logged.append(training.passes(is_pair))
        assert training.config.finalize_model_grads_func is finalize
    assert [len(each) for each in logged] == [3, 2]
    if per_token:
        assert training.gradient == sum(VALUES) and training.tokens == 5
    else:
        assert training.gradient / 2 == pytest.approx(sum(VALUES) / 5)
    values = torch.stack([one["lm loss"] for each in logged for one in each])
    expected = [sum(VALUES), 5.0] if is_pair else sum(VALUES)
    assert values.sum(dim=0).tolist() == expected


def test_an_evaluation_of_means_over_replicas_counts_each_micro_batch_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--sft: a replica's mean over its micro-batches, then the mean over replicas."""
    training = _Training(VALUES, sft=True)
    monkeypatch.setattr(shares, "_replica", lambda: training.replica)
    means = []
    for training.replica in (0, 1):
        pairs = torch.stack([one["lm loss"] for one in training.passes(True, is_training=False)])
        means.append((pairs[:, 0] / pairs[:, 1]).mean())
    assert sum(means) / 2 == pytest.approx(sum(VALUES) / 5)
    assert training.gradient == 0


def test_even_shares_are_left_alone() -> None:
    training, seen = _Training(VALUES[:4]), []
    given = {"model": [object()], "forward_step_func": object(), "num_microbatches": 2}

    def made(**rest: object) -> str:
        seen.append(rest)
        return "made"

    assert shares._passes(training, made, **given) == "made"
    assert seen == [given]
    job = SimpleNamespace(
        **vars(training.get_args()),
    )
    assert shares.steps_of(job, is_training=True) is None


@pytest.mark.parametrize(
    ("batch", "loader", "is_taken"),
    [(8, "single", True), (8, None, True), (8, "external", False), (2, "single", False)],
)
def test_megatron_takes_an_evaluations_batch_that_replicas_do_not_divide(
    batch: int, loader: str | None, is_taken: bool
) -> None:
    def validate(job: Any) -> Any:
        job.data_parallel_size, job.eval_micro_batch_size = 3, 1
        job.eval_global_batch_size = job.eval_global_batch_size or job.global_batch_size
        assert job.eval_global_batch_size % 3 == 0
        return job

    job = SimpleNamespace(
        eval_global_batch_size=None, global_batch_size=batch, micro_batch_size=1,
        dataloader_type=loader,
    )  # fmt: skip
    if is_taken:
        checked = shares.check_args(validate, None, (job,), {})
        assert type(checked.eval_global_batch_size) is int
        assert checked.eval_global_batch_size == batch
    else:
        with pytest.raises((AssertionError, RefusedError)):
            shares.check_args(validate, None, (job,), {})


def test_a_rounds_layout_of_stages_replaces_the_scripts_other_flags_of_them() -> None:
    flags = {
        "num_virtual_stages_per_pipeline_rank": 2, "decoder_first_pipeline_num_layers": 1,
        "account_for_loss_in_pipeline_split": True,
    }  # fmt: skip
    for layout, expected in (("Et|tL", [None, None, False]), (None, [2, 1, True])):
        job = SimpleNamespace(**flags, pipeline_model_parallel_layout=layout)
        shares.check_args(lambda job: job, None, (job,), {})
        assert [getattr(job, name) for name in flags] == expected
