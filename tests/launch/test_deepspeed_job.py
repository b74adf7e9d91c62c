"""A DeepSpeed configuration is all that an elastic job needs: block, batches and degrees."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import RefusedError, UsageError
from scalai.core.job.membership import Assignment
from scalai.core.job.spacing import FIRST_STEPS, MTBF_HOURS
from scalai.launch.commands.check_elastic import check_elastic
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.sizing import Sizing

Read = Callable[..., JobSpec]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that reads the job of a DeepSpeed configuration."""

    def of(config: dict[str, Any], *flags: str, script_flags: tuple[str, ...] = ()) -> JobSpec:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(config))
        named = ("--deepspeed_config", str(path))
        argv = [*flags, "--nnodes", "1", "train.py", *named, *script_flags]
        return JobSpec.read(parse_options(argv))

    return of


def assigned(sizing: Sizing, slots: int) -> Degrees | None:
    found = sizing.assign()((("a", slots),), None)
    return found.degrees if found else None


def test_a_block_makes_the_job_elastic_and_no_block_does_not(read: Read) -> None:
    spec = read({"train_batch_size": 12, "scalai": {"store": {"snapshot_every": 7}}})
    assert spec.is_elastic and spec.config.store.snapshot_every == 7
    again = JobSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec and spec.difference(again) is None
    assert not read({"train_batch_size": 12}).is_elastic
    other = read({"train_batch_size": 24, "scalai": {"store": {"snapshot_every": 7}}})
    assert "deepspeed is" in (spec.difference(other) or "")


def test_a_job_chooses_how_often_a_snapshot_is_made_where_it_is_to(read: Read) -> None:
    said = read({"scalai": {"store": {"snapshot_every": 7}}})
    assert (said.spacing.every, said.spacing.is_auto) == (7, False)
    store = {"snapshot_every": "auto"}
    chosen = read({"scalai": {"store": store, "resize": {"silent_s": 4}}}).spacing
    assert (chosen.every, chosen.is_auto) == (FIRST_STEPS, True)
    assert (chosen.mtbf_hours, chosen.lead_s) == (MTBF_HOURS, 8.0)


def test_a_slip_in_the_block_is_named_with_the_file(read: Read) -> None:
    with pytest.raises(UsageError, match=r"ds\.json: .*'snapshot_every'"):
        read({"train_batch_size": 12, "scalai": {"store": {"snapshot_evry": 7}}})
    with pytest.raises(UsageError, match="expected 0, 1, 2 or 3"):
        read({"scalai": {"deepspeed": {"zero_stage": {"4": 4}}}})
    with pytest.raises(UsageError, match="a number of ranks or default"):
        read({"scalai": {"deepspeed": {"zero_stage": {"four": 1}}}})


def test_elastic_wins_over_the_block(read: Read, tmp_path: Path) -> None:
    config = {"train_batch_size": 12, "scalai": {"store": {"snapshot_every": 7}}}
    toml, other = tmp_path / "elastic.toml", tmp_path / "other.json"
    toml.write_text("[store]\nsnapshot_every = 8\n")
    other.write_text('{"scalai": {"store": {"snapshot_every": 9}}}')
    assert read(config, "--elastic", str(toml)).config.store.snapshot_every == 8
    spec = read(config, "--elastic", str(other))
    assert spec.config.store.snapshot_every == 9
    assert spec.script.limits.global_batch_size == 12
    alone = JobSpec.read(parse_options(["--elastic", str(other), "train.py"]))
    assert alone.deepspeed == json.loads(other.read_text()) and alone.is_elastic
    other.write_text("{}")
    with pytest.raises(UsageError, match='without a "scalai" block'):
        read(config, "--elastic", str(other))


def test_where_a_script_places_its_data_replicas_divide_the_global_batch(read: Read) -> None:
    own = {"deepspeed": {"data_order": "own"}}
    spec = read({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "scalai": own})
    sizing = Sizing(spec)
    assert [assigned(sizing, slots) for slots in (4, 5, 7)] == [
        Degrees(1, 1, 4), Degrees(1, 1, 4), Degrees(1, 1, 6),
    ]  # fmt: skip
    report = str(check_elastic(spec.options, spec.config, 5, spec.deepspeed))
    assert "dp=5 does not divide global_batch_size=12" in report
    strict = read({"train_batch_size": 12, "scalai": {"degrees": {"5": "dp5"}, **own}})
    with pytest.raises(ValueError, match="Correct the entry"):
        check_elastic(strict.options, strict.config, 5, strict.deepspeed)


def test_replicas_need_not_divide_the_global_batch_and_none_makes_fillers_alone(
    read: Read,
) -> None:
    sizing = Sizing(read({"train_batch_size": 12, "scalai": {}}))
    found = [sizing.assign()((("a", slots),), None) for slots in (5, 7, 13)]
    assert [each.degrees.dp for each in found if each] == [4, 6, 12]
    assert found[1] and "DP7 would need as many passes as DP6" in found[1].reason


def test_a_batch_that_only_the_first_round_knows_is_learned(read: Read) -> None:
    sizing = Sizing(read({"train_micro_batch_size_per_gpu": 2, "scalai": {}}))
    assert assigned(sizing, 5) == Degrees(1, 1, 5)
    sizing.learn({"facts": {"global_batch_size": 8}})
    assert assigned(sizing, 5) == Degrees(1, 1, 4)
    sizing.learn({"facts": {"global_batch_size": 8, "has_uneven_shares": True}})
    assert assigned(sizing, 3) == Degrees(1, 1, 3)


def test_the_first_degrees_are_the_scripts_own(read: Read) -> None:
    config = {"train_batch_size": 12, "scalai": {}, "tensor_parallel": {"autotp_size": 2}}
    assert assigned(Sizing(read(config)), 4) == Degrees(2, 1, 2)
    assert read(config).script.limits.global_batch_size == 6, "what a step has"
    del config["tensor_parallel"]
    spec = read(config, script_flags=("--pipeline-parallel-size", "2"))
    assert assigned(Sizing(spec), 4) == Degrees(1, 2, 2)
    spec = read({**config, "scalai": {"degrees": {"default": "pp4"}}})
    assert assigned(Sizing(spec), 4) == Degrees(1, 4, 1)


def test_the_stage_follows_the_world(read: Read) -> None:
    block = {"deepspeed": {"zero_stage": {"default": 1, "2": 3}}}
    spec = read({"train_batch_size": 12, "scalai": block})
    assert [spec.hook_settings(n)["zero_stage"] for n in (4, 2)] == [1, 3]
    assert spec.hook_settings(4)["zero_stages"] == {"default": 1, "2": 3}, "that may come to be"
    assert read({"scalai": {}}).hook_settings(4)["zero_stage"] is None


def test_what_keeps_ranks_from_changing_is_refused_before_the_start(read: Read) -> None:
    curriculum = {"data_sampling": {"curriculum_learning": {"enabled": True}}}
    config = {"train_batch_size": 12, "sequence_parallel_size": 2, "data_efficiency": curriculum}
    spec = read({**config, "scalai": {}})
    with pytest.raises(RefusedError, match=r"sequence_parallel_size = 2.*curriculum_learning"):
        check_elastic(spec.options, spec.config, 4, spec.deepspeed)
    assert not read(config).is_elastic
    fine = read({"train_batch_size": 12, "sequence_parallel_size": 1, "scalai": {}})
    assert check_elastic(fine.options, fine.config, 4, fine.deepspeed)


@pytest.mark.parametrize(
    ("config", "is_placed"),
    [
        ({}, False),
        ({"zero_optimization": {"stage": 0}}, False),
        ({"zero_optimization": {"stage": 1}}, True),
        ({"zero_optimization": {"stage": 3}}, True),
        ({"scalai": {"deepspeed": {"zero_stage": {"4": 2, "default": 0}}}}, True),
        ({"scalai": {"deepspeed": {"zero_stage": {"default": 0}}}}, False),
    ],
)
def test_hosts_keep_their_parts_of_the_state_where_zero_cuts_it(
    read: Read, config: dict[str, Any], is_placed: bool
) -> None:
    block: dict[str, Any] = {"train_batch_size": 12, "scalai": {}}
    sizing, four = Sizing(read({**block, **config})), Degrees(1, 1, 4)
    ran, target = (
        Assignment(tuple((name, 2) for name in hosts), four, 1, "why") for hosts in ("ab", "bc")
    )
    found = sizing.place(target, ran, (("b", 2), ("c", 2)))
    assert found.active == (("c", "b") if is_placed else ("b", "c"))


def refused(sizing: Sizing, slots: int, degrees: str) -> str:
    """Return why nothing is taken for a request."""
    why: list[str] = []
    assert sizing.scaled(None, None, degrees, why.append)((("a", slots),), None) is None
    return why[0]


def test_a_pipeline_is_not_offered_where_zero_shards_gradients(read: Read) -> None:
    block = {"degrees": {"default": "pp2"}, "deepspeed": {"zero_stage": {"default": 1, "4": 2}}}
    sizing = Sizing(read({"train_batch_size": 12, "scalai": block}))
    assert assigned(sizing, 2) == Degrees(1, 2, 1)
    assert assigned(sizing, 4) == Degrees(1, 2, 1), "on four ranks gradients are sharded"
    assert "ZeRO stage 2 on 4 ranks, where a pipeline (pp=2)" in refused(sizing, 4, "pp2 dp2")


def test_what_a_round_has_told_of_its_pipeline_holds_for_the_next(read: Read) -> None:
    block = {"degrees": {"default": "pp2"}, "deepspeed": {"zero_stage": {"1": 3}}}
    sizing = Sizing(read({"train_batch_size": 12, "scalai": block}))
    sizing.learn({"facts": {"pipeline_layers": 4}})
    assert "pp=6 is more than the 4 layers" in refused(sizing, 6, "pp6")
    assert sizing.scaled(None, None, "pp1", print)((("a", 1),), None) is not None
    sizing.learn({"facts": {"pipeline_layers": 4, "is_in_stages": True}})
    assert "ZeRO stage 3 on 1 ranks" in refused(sizing, 1, "pp1")


def test_stages_need_not_divide_the_layers_and_may_be_fewer(read: Read) -> None:
    block = {"degrees": {"default": "pp4"}, "resize": {"min_model_parallel": 1}}
    sizing = Sizing(read({"train_batch_size": 12, "scalai": block}))
    sizing.learn({"facts": {"pipeline_layers": 10}})
    ran = Assignment((("a", 8),), Degrees(1, 4, 2), 1, "why")
    found = sizing.assign()((("a", 3),), ran)
    assert found is not None and found.degrees == Degrees(1, 1, 3)
    block = {"planner": {"kind": "cost", "gpu": "a100-80gb", "model": MODEL}}
    given = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1, "scalai": block}
    spec = read(given, script_flags=("--num-stages", "2"))
    report = check_elastic(spec.options, spec.config, 8, spec.deepspeed)
    assert any(line.startswith("may change: pp 1 to 4, 8;") for line in report.changes)


def test_axes_that_deepspeed_does_not_have_are_refused(read: Read) -> None:
    config: dict[str, Any] = {"train_batch_size": 24, "scalai": {}}
    sizing = Sizing(read(config))
    for axis in ("vpp", "cp", "ep"):
        assert f"{axis}=2 must stay 1: DeepSpeed's" in refused(sizing, 8, f"tp1 pp2 {axis}2")
    config["tensor_parallel"] = {"autotp_size": 2}
    assert "AutoTP takes all ranks" in refused(Sizing(read(config)), 8, "tp2 pp2")


def test_a_configuration_that_deepspeed_would_not_take_in_a_later_round_is_refused(
    read: Read,
) -> None:
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    block = {"deepspeed": {"zero_stage": {"2": 1}}}
    spec = read({"train_batch_size": 12, "zero_optimization": offload, "scalai": block})
    with pytest.raises(RefusedError, match=r"in stage 3 alone \(ZeRO stage 1\)"):
        check_elastic(spec.options, spec.config, 4, spec.deepspeed)


MODEL = {"layers": 8, "hidden": 1024, "heads": 16, "seq": 1024, "vocab": 32000}


def planned(read: Read, *script_flags: str, **config: Any) -> Sizing:
    block = {"planner": {"kind": "cost", "gpu": "a100-80gb", "model": MODEL}}
    batch = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4}
    given = {**batch, "bf16": {"enabled": True}, "scalai": block, **config}
    return Sizing(read(given, script_flags=script_flags))


def test_degrees_are_computed_where_the_model_is_stated(read: Read) -> None:
    """The global batch stays, of which 5 replicas have uneven shares."""
    found = planned(read).assign()((("a", 5),), None)
    assert found is not None and found.degrees == Degrees(1, 1, 5)
    assert "by cost:" in found.reason


def test_only_degrees_that_the_script_cuts_and_deepspeed_takes_are_computed(read: Read) -> None:
    world = (("a", 8),)

    def offered(sizing: Sizing) -> set[Degrees]:
        facts: list[Degrees] = []
        for _ in range(40):
            found = sizing.assign()(world, None)
            if found is None:
                break
            facts.append(found.degrees)
            sizing.exclude(found)
        return set(facts)

    plain = offered(planned(read))
    assert plain and all(each.model_parallel == 1 for each in plain)
    cut = {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 96}
    automatic = offered(planned(read, **cut))
    assert any(each.tp > 1 for each in automatic) and all(each.pp == 1 for each in automatic)
    stages = planned(read, "--num-stages", "2", zero_optimization={"stage": 2})
    assert all(each.pp == 1 for each in offered(stages))


def test_the_planner_says_what_it_needs_of_a_deepspeed_job(read: Read) -> None:
    block = {"planner": {"kind": "cost", "gpu": "a100-80gb"}}
    with pytest.raises(RefusedError, match=r"state it by \[planner\] model"):
        Sizing(read({"train_batch_size": 12, "scalai": block}))
    block["planner"]["model"] = {**MODEL, "depth": 3}  # type: ignore[assignment]
    with pytest.raises(RefusedError, match="'depth' is no size of a model"):
        Sizing(read({"train_batch_size": 12, "scalai": block}))
    offload = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}
    with pytest.raises(RefusedError, match="which is not modelled"):
        planned(read, zero_optimization=offload)


def test_the_state_of_a_deepspeed_job_may_go_to_host_memory_where_nothing_else_is_left(
    read: Read,
) -> None:
    def next_after(*tried: Assignment, **config: Any) -> tuple[Sizing, Assignment | None]:
        sizing = Sizing(read({"train_batch_size": 12, "scalai": {}, **config}))
        for each in tried:
            sizing.exclude(each)
        return sizing, sizing.assign()((("a", 2),), None)

    zero3 = {"zero_optimization": {"stage": 3}}
    _, plain = next_after(**zero3)
    assert plain is not None and plain.offload is None
    sizing, spilled = next_after(plain, **zero3)
    assert spilled is not None and spilled.offload == "optimizer"
    assert "offload none -> optimizer" in spilled.reason
    _, most = next_after(plain, spilled, **zero3)
    assert most is not None and most.offload == "parameters"
    _, none = next_after(plain, spilled, zero_optimization={"stage": 2})
    assert none is None, "stage 3 alone spills weights"
    sizing.learn({"facts": {"offload_fault": "the script's optimizer is Ranger"}})
    assert sizing.assign()((("a", 2),), None) is None
    _, own = next_after(
        plain, zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}}
    )
    assert own is None, "the script's own stays as it is"


def test_a_micro_batch_that_only_the_first_round_knows_lets_the_planner_begin(read: Read) -> None:
    planner = {"gpu": "a100-80gb", "model": MODEL}
    sizing = Sizing(read({"train_batch_size": 48, "scalai": {"planner": planner}}))
    assert not sizing.has_planner
    sizing.learn({"facts": {"first_micro_batch_size": 4}})
    assert sizing.has_planner and sizing.micro_batch_size == 4
