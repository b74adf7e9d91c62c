"""The live state of a job of either framework: listing it disturbs nothing, and all of it comes
back; what cannot move is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalai.core.errors import RefusedError
from scalai.core.tensors.fingerprint import differing_replicas
from scalai.patches.megatron.optimizer_state import (
    Owned,
    owned_parameters,
    put_scalars,
    take_scalars,
)
from scalai.patches.megatron.shapes import global_name
from support.training.deepspeed_jobs import Job as EngineJob
from support.training.jobs import Job
from support.training.worker_pool import WorkerPool

SPLIT: dict[str, Any] = {"distributed": True, "overlap": True}
HOST = {"device": "cpu"}


@pytest.fixture
def trained(request: pytest.FixtureRequest) -> Any:
    """Call a function of ``live_checks`` on all ranks of a job."""

    def call(function: str, job: Job | EngineJob, *more: Any) -> list[Any]:
        name = "pool" if isinstance(job, Job) else "deepspeed_pool"
        pool: WorkerPool = request.getfixturevalue(name)
        return pool.run(f"live_checks:{function}", [(pool.trainer, job, *more)] * job.world)

    return call


@pytest.mark.parametrize(
    "job",
    [
        Job(world=2),
        Job(world=2, **SPLIT),
        EngineJob(world=2, stage=1, zero={"round_robin_gradients": True}),
        EngineJob(
            world=2, stage=3, zero={"sub_group_size": 300, "stage3_param_persistence_threshold": 60}
        ),
        EngineJob(world=2, stage=0, precision="bf16"),
    ],
    ids=["whole", "split", "zero1", "zero3", "bf16-zero0"],
)
def test_listing_the_state_changes_nothing_and_it_stays_where_it_is(trained: Any, job: Any) -> None:
    assert trained("losses", job, True) == trained("losses", job, False)
    assert trained("held_twice", job) == [True, True]


@pytest.mark.fault
@pytest.mark.parametrize(
    "job",
    [
        Job(world=2, **SPLIT, precision="bf16"),
        Job(world=2, experts=4, ep=2, has_expert_bias=True),
        Job(world=4, tp=2, pp=2, precision="fp16"),
        EngineJob(world=2, stage=1, precision="bf16"),
        EngineJob(world=2, stage=2),
        EngineJob(
            world=2, stage=3, zero={"offload_optimizer": HOST},
            config={"zero_force_ds_cpu_optimizer": False},
        ),
    ],
    ids=[
        "overlapped-bf16", "experts-with-a-bias", "tp-and-pp-fp16", "zero1-bf16", "zero2",
        "zero3-offloaded",
    ],
)  # fmt: skip
def test_what_is_copied_behind_a_backward_pass_is_of_its_step(trained: Any, job: Any) -> None:
    """Frameworks change nothing between two updates, beside what is copied at a step's end. So a
    snapshot whose copy begins behind the next backward pass is that of its step all the same."""
    found = trained("differing", job)
    assert not any(found), found


@pytest.mark.parametrize(
    ("job", "here"),
    [(Job(world=2, tp=2), "tp2,etp2"), (EngineJob(world=2, stage=1), "dp2")],
    ids=["megatron", "deepspeed"],
)
def test_random_streams_go_on_from_their_json_or_begin_anew_alike_on_all_ranks(
    trained: Any, job: Any, here: str
) -> None:
    first, second = trained("rng_states", job)
    assert first["is_continued"] and second["is_continued"]
    (new, own), (others, others_own) = first["new"], second["new"]
    assert new == others != first["old"][0]
    # Megatron needs it so: equal streams outside of tensor-parallel regions, unequal ones inside.
    assert (own is None) if here == "dp2" else (own != others_own)
    assert first["notes"] == [
        "rng=continued",
        f"rng=reseeded seed=1234 step=3 degrees_before=dp8,zero3 degrees={here}",
    ]


# ------------------------------------------------------------------ DeepSpeed


def test_buffers_are_those_of_the_first_replica_and_all_get_them(
    deepspeed_pool: WorkerPool,
) -> None:
    job = EngineJob(world=2)
    first, second = deepspeed_pool.run("deepspeed_state_checks:buffers", [(job,)] * 2)
    names = {f"param/{name}" for name in ("calls", "average", "is_seen", "order")}
    assert (first, second) == ((names, names), (set(), names))


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("steps", ["one number of steps"]),
        ("groups", ["in several before"]),
        ("accumulation", ["1 of 2 micro-batches"]),
        ("memory", ["param/average"]),
        ("master", ["master 0"]),
        ("degrees", ["sp=2"]),
        ("optimizer", ["RMSprop", "Adam"]),
    ],
)
def test_a_state_that_does_not_fit_or_is_not_known_is_refused_by_name(
    deepspeed_pool: WorkerPool, fault: str, named: list[str]
) -> None:
    job = EngineJob(stage=1, config={"gradient_accumulation_steps": 2})
    (message,) = deepspeed_pool.run("deepspeed_state_checks:refused_state", [(job, fault)])
    assert all(word in message for word in named), message


def test_what_a_step_leaves_is_kept_without_a_look_at_the_cuts_of_its_parameters(
    deepspeed_pool: WorkerPool,
) -> None:
    """Each step does it."""
    assert deepspeed_pool.run(
        "deepspeed_state_checks:kept_without_cuts", [(EngineJob(world=2, stage=1),)] * 2
    ) == [True, True]


@pytest.mark.parametrize(
    ("zero", "values", "named"),
    [
        ({"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, {}, "nvme"),
        ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}, {}, "offload_param"),
        ({"stage": 3, "offload_optimizer": {**HOST, "ratio": 0.5}}, {}, "ratio 0.5"),
        ({"stage": 3, "zero_hpz_partition_size": 2}, {}, "zero_hpz_partition_size 2"),
        ({"stage": 3, "zero_quantized_weights": True}, {}, "zero_quantized_weights"),
        ({}, {"has_moe_layers": True}, "experts"),
        ({}, {"optimizer": None}, "no optimizer"),
        ({"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}, {}, ""),
        ({"stage": 1, "round_robin_gradients": True}, {}, ""),
    ],
)
def test_what_cannot_move_is_refused_at_the_start(
    deepspeed_pool: WorkerPool, zero: dict[str, Any], values: dict[str, Any], named: str
) -> None:
    (message,) = deepspeed_pool.run("deepspeed_state_checks:refusal", [(zero, values)])
    assert named in message and bool(message) == bool(named)


# ------------------------------------------------------------------ Megatron


def test_parameter_groups_of_another_optimizer_are_refused(pool: WorkerPool) -> None:
    (message,) = pool.run("megatron_checks:another_schedule", [()])
    assert "in several before" in message and "'wd_mult': 0.0" in message


def test_steps_are_told_by_ranks_that_own_parameters(pool: WorkerPool) -> None:
    ((steps, _),) = pool.run("megatron_checks:owner_of_a_group", [()])
    assert steps == [7]


def differing(pool: WorkerPool, job: Job, *drifting: str) -> str:
    held = pool.run("megatron_checks:replicas", [(job, *drifting)] * job.world)
    collections = {rank: collection for rank, (collection, _) in enumerate(held)}
    return differing_replicas(collections, {rank: of for rank, (_, of) in enumerate(held)})


@pytest.mark.parametrize(
    "job",
    [
        Job(world=2),
        Job(world=2, tp=2, sequence_parallel=True),
        Job(world=2, pp=2),
        Job(world=4, tp=2, precision="bf16", distributed=True),
        Job(world=4, tp=2, sequence_parallel=True, experts=4, ep=2),
    ],
    ids=["dp", "tp", "tied-pp", "tp-dp-split", "experts"],
)
def test_what_ranks_hold_alike_is_equal_bit_by_bit(pool: WorkerPool, job: Job) -> None:
    """Replicas of data and tensor parallelism, and tied weights of stages: a healthy job is never
    taken for one whose replicas drift."""
    assert differing(pool, job) == ""


def test_replicas_that_drift_are_named(pool: WorkerPool) -> None:
    name = "param/decoder.layers.1.self_attention.linear_qkv.layer_norm_bias"
    assert differing(pool, Job(world=2, tp=2), name) == f"'{name}' on ranks [0, 1]"


LOADED = {"max_lr": 1e-3, "min_lr": 1e-4, "start_wd": 0.2, "end_wd": 0.4}
"""What a checkpoint said, whatever the flags."""
SET = {"betas": (0.9, 0.99), "eps": 1e-6}
"""What a script has set."""
FLAGS = {"max_lr": 5e-2, "lr_decay_steps": 160}
"""What a person has changed before a restart."""


def moved(pool: WorkerPool, *given: Any) -> Any:
    (found,) = pool.run("megatron_checks:moved_groups", [given])
    return found


@pytest.mark.fault
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("wins", ["", "use_checkpoint", "override"])
def test_groups_go_on_with_every_value_that_a_checkpoint_or_the_script_gave_them(
    pool: WorkerPool, wins: str, distributed: bool
) -> None:
    given: Any = Job(distributed=distributed), {**LOADED, **SET}, {}, wins
    before, after, now, now_after = moved(pool, *given)
    assert now == before and now_after == after
    assert all(values["max_lr"] == 1e-3 and values["lr"] < 1e-3 for values in now)
    assert max(values["weight_decay"] for values in now) > 0.2


@pytest.mark.fault
def test_flags_that_a_person_has_changed_are_refused_by_name_where_nothing_says_whether_they_count(
    pool: WorkerPool,
) -> None:
    message = moved(pool, Job(), SET, FLAGS, "")
    for text in ("max_lr 0.05", "0.01", "lr_decay_steps 160", "--override-opt_param-scheduler"):
        assert text in message


@pytest.mark.fault
def test_flags_that_a_person_has_changed_count_where_they_override_and_not_where_the_state_is_used(
    pool: WorkerPool,
) -> None:
    before, _, now, _ = moved(pool, Job(), SET, FLAGS, "override")
    for then, values in zip(before, now, strict=True):
        assert values["max_lr"] == 5e-2 and values["lr"] > 4 * then["lr"]
        assert values["betas"] == (0.9, 0.99) and values["weight_decay"] == then["weight_decay"]
    before, after, now, now_after = moved(pool, Job(), SET, FLAGS, "use_checkpoint")
    assert now == before and now_after == after


def test_groups_that_say_the_same_of_themselves_keep_their_own_rates_under_a_schedule_of_ones_own(
    pool: WorkerPool,
) -> None:
    (((length, rates), now),) = pool.run("megatron_checks:moved_rates", [()])
    assert now == (length, rates) and rates[0] == 2 * rates[1] > 0


class FusedAdam:
    """By the names that Megatron-LM uses of Transformer Engine's."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": parameters}]
        self.state: dict[torch.Tensor, dict[str, Any]] = {p: {} for p in parameters}
        self.remainders: list[bool] = []

    def initialize_state(self, parameter: torch.Tensor, store_param_remainders: bool) -> None:
        self.remainders.append(store_param_remainders)
        moments = (torch.zeros(parameter.shape, dtype=torch.bfloat16) for _ in range(2))
        self.state[parameter] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))


class Hybrid:
    """HybridDeviceOptimizer (0.16.1): some parameters' masters are updated on the host."""

    def __init__(self, inner: dict[torch.Tensor, torch.Tensor], fused: FusedAdam) -> None:
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        on_host = [copy for copy in inner.values() if copy not in fused.state]
        self.sub_optimizers: tuple[Any, ...] = (torch.optim.AdamW(on_host), fused)
        self._inner = inner

    def _sync_sub_optimizers_state_to_hdo(self) -> None:
        states = {id(p): of for part in self.sub_optimizers for p, of in part.state.items()}
        for parameter, copy in self._inner.items():
            self.state[parameter] = {**states[id(copy)], "master_param": copy}


def hybrid_leaf() -> tuple[Any, FusedAdam, list[torch.Tensor], list[torch.Tensor]]:
    """Return Megatron-LM's optimizer of two parameters, the first one's master on the host, the
    part of the second, and both shards and masters."""
    model = [torch.ones(6, dtype=torch.bfloat16) * n for n in (1, 2)]
    shards = [parameter[2:5] for parameter in model]
    masters = [shard.float() for shard in shards]
    fused = FusedAdam([masters[1]])
    leaf = SimpleNamespace(
        optimizer=Hybrid(dict(zip(shards, masters, strict=True)), fused),
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True),
        gbuf_ranges=[], model_float16_groups=[model], model_fp32_groups=[[]],
        shard_float16_groups=[shards], shard_fp32_groups=[[]],
        shard_fp32_from_float16_groups=[[None, None]],
        _get_model_param_range_map=lambda _: {"param": SimpleNamespace(start=2, end=5)},
    )  # fmt: skip
    return leaf, fused, shards, masters


def test_masters_of_a_hybrid_optimizer_are_those_that_are_updated() -> None:
    leaf, fused, shards, masters = hybrid_leaf()
    first, second = owned_parameters(leaf)
    for owned, shard, master in zip((first, second), shards, masters, strict=True):
        assert isinstance(owned, Owned)
        assert owned.main is shard and owned.master is master
        assert (owned.low, owned.high, owned.is_sharded) == (2, 5, True)
    assert set(first.state) == {"step", "exp_avg", "exp_avg_sq"}
    assert {value.dtype for value in second.state.values()} == {torch.bfloat16}
    assert fused.remainders == [False]
    assert list(owned_parameters(leaf))[1].state.keys() == second.state.keys()  # made once
    assert fused.remainders == [False]


@pytest.mark.fault
def test_beside_fused_adam_both_halves_of_a_hybrid_optimizer_have_one_number_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron.core.optimizer.Adam", FusedAdam)
    leaf, fused, shards, masters = hybrid_leaf()
    inner = leaf.optimizer
    inner.param_groups = [{"params": shards, "lr": 0.1}]
    inner.param_to_inner_param = dict(zip(shards, masters, strict=True))
    names = {id(shard): [name] for name, shard in zip("ab", shards, strict=True)}
    assert all("step" not in owned.state for owned in owned_parameters(leaf))
    on_host = inner.sub_optimizers[0].state[masters[0]]["step"]
    fused.param_groups[0]["step"] = 4
    with pytest.raises(RefusedError, match="have made 0, 4 steps"):
        take_scalars(leaf, None, names, None)
    on_host.fill_(4)
    saved = take_scalars(leaf, None, names, None)()
    on_host.fill_(0)
    fused.param_groups[0]["step"] = 0
    put_scalars(saved, leaf, None, names, None)
    assert on_host == fused.param_groups[0]["step"] == 4
    assert "step" not in inner.param_groups[0], "it would go to the halves again"


# ------------------------------------------------------------------ pieces of a parameter


@pytest.mark.parametrize(
    ("check", "names"),
    [
        ("gated", ["linear_fc1.weight [12, 4] [3, 0]", "linear_fc1.weight [12, 4] [9, 0]"]),
        ("mamba", ["in_proj.weight.z ", "in_proj.weight.x ", "in_proj.weight.B ", ".weight.dt "]),
        ("transposed", [f"linear_fc1.weight [4, 20, 6] [0, {row}, 0]" for row in (5, 15)]),
    ],
    ids=["two boxes of one tensor", "a part of four tensors", "transposed and copied"],
)
def test_pieces_of_a_parameter_are_what_megatrons_own_checkpoints_cut_out_of_it(
    pool: WorkerPool, check: str, names: list[str]
) -> None:
    (compared,) = pool.run(f"megatron_checks:{check}", [()])
    assert len(compared) == len(names)
    assert all(name in text for name, text in zip(names, compared, strict=True)), compared


def test_a_factory_that_changes_values_is_refused_by_name(pool: WorkerPool) -> None:
    (message,) = pool.run("megatron_checks:averaging", [()])
    assert "linear_fc1.weight" in message and "slice" in message


def test_names_do_not_depend_on_how_megatron_counts_layers() -> None:
    fc1, experts = "mlp.linear_fc1.weight", "mlp.experts.experts"
    for key, index in ((f"decoder.layers.{fc1}", [3]), (f"decoder.layers.3.{fc1}", [])):
        assert global_name(key, index) == f"decoder.layers.3.{fc1}"
    for layer, index in (("", [3, 1]), ("3.", [1])):
        found = global_name(f"decoder.layers.{layer}{experts}.linear_fc1.weight", index)
        assert found == f"decoder.layers.3.{experts}.1.linear_fc1.weight"


@pytest.mark.fault
def test_a_parameter_that_ranks_have_cut_and_that_is_said_to_be_whole_is_refused_by_name(
    pool: WorkerPool,
) -> None:
    """One rank's part would be kept for all."""
    for message in pool.run("megatron_checks:adapter", [(2, False)] * 2):
        assert "decoder.layers.1.self_attention.lora.b [8, 2]" in message and "axis 0" in message


@pytest.mark.parametrize(
    "given", [(2, True), (1, False), (2, False, True)], ids=["described", "uncut", "duplicated"]
)
def test_a_parameter_that_is_described_or_not_cut_is_taken(
    pool: WorkerPool, given: tuple[Any, ...]
) -> None:
    """Transformer Engine marks weights as cut that it duplicates; so are the down projections of
    latent attention, up to Megatron-core 0.16."""
    assert pool.run("megatron_checks:adapter", [given] * 2) == ["taken"] * 2
