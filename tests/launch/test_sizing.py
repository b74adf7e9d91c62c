"""A person's requests about a job's size hold wherever they fit; then what its planner computes."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import RefusedError, UsageError
from scalai.core.job.membership import Assignment, Job, Phase, keep_order
from scalai.core.job.spacing import Pace
from scalai.core.messages.shared import JsonText
from scalai.core.planner import preference
from scalai.core.planner.meter import ChangeTime
from scalai.core.planner.preference import Measured
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator import sizing as sizing_module
from scalai.launch.coordinator.live_job import first_state
from scalai.launch.coordinator.look_ahead import Calibrating
from scalai.launch.coordinator.sizing import Sizing
from support.laws import ran

FOUR, TWO, ONE = (("a", 2), ("b", 2)), (("a", 2),), (("a", 1),)
Hosts = tuple[tuple[str, int], ...]


def taken(sizing: Sizing, hosts: Hosts = FOUR, present: Degrees | None = None) -> Assignment:
    """Return what it takes on these hosts."""
    found = sizing.assign()(hosts, None if present is None else ran(present))
    assert found is not None
    return found


def scaled(
    sizing: Sizing, wish: str, hosts: Hosts, present: Degrees, nproc: int | None = None
) -> tuple[Assignment | None, str]:
    """Return what a request leads to as a dry run, and why to nothing."""
    why = [""]
    return sizing.scaled(nproc, None, wish, why.append)(hosts, ran(present)), why[-1]


@pytest.fixture
def of_file(tmp_path: Path) -> Callable[..., Sizing]:
    """Return a function that reads a job by its elastic configuration."""

    def read(
        config: str, *flags: str, script: str = "script.py", say: Callable[[str], object] = print
    ) -> Sizing:
        path = tmp_path / "elastic.toml"
        path.write_text(config)
        given = ["--nnodes", "1:2", "--nproc-per-node", "2", "--elastic", str(path), *flags]
        return Sizing(JobSpec.read(parse_options([*given, *script.split()])), say)

    return read


MODEL = "[model]\nnum_attention_heads = 8\n"


@pytest.fixture
def sizing(of_file: Callable[..., Sizing]) -> Sizing:
    return of_file(f'[degrees]\n4 = "tp2"\n2 = "tp1"\n{MODEL}')


def test_requested_degrees_hold_until_the_next_scale_wherever_they_fit(sizing: Sizing) -> None:
    sizing.rescale(None, None, "tp4")
    assert taken(sizing, FOUR, Degrees(2, 1, 2)).degrees == Degrees(4, 1, 1)
    assert taken(sizing, FOUR, Degrees(4, 1, 1)).degrees == Degrees(4, 1, 1)
    assert taken(sizing, TWO, Degrees(4, 1, 1)).degrees == Degrees(1, 1, 2), "the job goes on"
    sizing.rescale(None, None, None)
    assert taken(sizing, FOUR, Degrees(4, 1, 1)).degrees == Degrees(2, 1, 2)
    sizing.rescale(None, 1, None)
    assert taken(sizing).workers == (("a", 2), ("b", 0)), "later hosts are idle"


def test_a_request_that_does_not_fit_is_not_taken_for_another(sizing: Sizing) -> None:
    assert scaled(sizing, "tp4", TWO, Degrees(1, 1, 2))[0] is None


def test_who_takes_over_goes_by_what_persons_asked_for_and_what_ran_out_of_memory(
    of_file: Callable[..., Sizing],
) -> None:
    before, after = of_file(MODEL), of_file(MODEL)
    first = taken(before)
    before.exclude(first)
    before.rescale(3, 2, None)
    after.take_over(before.request)
    assert after.request == before.request
    for hosts in (FOUR, TWO):
        found = after.assign()(hosts, None)
        assert found == before.assign()(hosts, None)
        assert found is None or found.degrees != first.degrees


MEGATRON = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8 --bf16"
)
SLOW, FAST = Degrees(1, 1, 4), Degrees(2, 1, 2)


def learned(sizing: Sizing, found: Measured, change_s: float | None) -> None:
    change = None if change_s is None else ChangeTime(change_s, change_s / 10)
    result = sizing.with_measured(found, change)
    assert result is not None
    sizing.adopt(*result)


def learn(sizing: Sizing) -> None:
    learned(sizing, Measured(SLOW, 1, 50, 2.0), 10.0)
    learned(sizing, Measured(FAST, 1, 50, 1.0), 10.0)


GPU = '[planner]\ngpu = "a100-80gb"\n'
Planned = Callable[..., Sizing]


@pytest.fixture
def planned(of_file: Callable[..., Sizing]) -> Planned:
    """Return a function that reads a Megatron-LM job on a known device."""

    def read(
        *flags: str, config: str = GPU, script: str = f"{MEGATRON} --padded-vocab-size 1024",
        say: Callable[[str], object] = print,
    ) -> Sizing:  # fmt: skip
        return of_file(config, *flags, script=script, say=say)

    return read


def runs(sizing: Sizing, present: Degrees | None) -> Degrees:
    return taken(sizing, FOUR, present).degrees


def test_degrees_are_kept_until_two_layouts_were_measured(planned: Planned) -> None:
    sizing = planned()
    assert sizing.has_planner
    assert runs(sizing, SLOW) == SLOW
    learned(sizing, Measured(SLOW, 1, 50, 2.0), None)
    assert runs(sizing, SLOW) == SLOW
    learned(sizing, Measured(FAST, 1, 50, 1.0), 10.0)
    taken = runs(sizing, SLOW)
    assert taken != SLOW
    assert runs(sizing, taken) == taken
    sizing.rescale(None, None, "tp1 pp2")
    assert runs(sizing, SLOW) == Degrees(1, 2, 2), "a person's request wins"


def test_who_takes_over_knows_what_was_measured(planned: Planned) -> None:
    before, after = planned(), planned()
    learn(before)
    after.take_over(before.request)
    assert after.request == before.request
    assert runs(after, SLOW) == runs(before, SLOW) != SLOW


def test_who_takes_over_computes_beside_the_job_what_was_measured(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = planned(), planned()
    learn(before)
    with monkeypatch.context() as patched:
        patched.setattr(preference, "calibrate", lambda x, seconds: pytest.fail("in the lock"))
        after.take_over(before.request)
    found = after.recalibrated()
    assert found is not None
    after.adopt(*found)
    assert after.recalibrated() is None
    assert taken(after, FOUR, SLOW).reason == taken(before, FOUR, SLOW).reason, (
        "it predicts what its predecessor did"
    )


def test_who_takes_over_knows_what_a_change_takes(planned: Planned) -> None:
    before, after = planned(), planned()
    learned(before, Measured(SLOW, 1, 50, 2.0), 321.0)
    after.take_over(before.request)
    learned(after, Measured(FAST, 1, 50, 1.0), None)
    assert "a change costs 321 s" in taken(after, FOUR, SLOW).reason


def test_what_was_measured_waits_for_a_vocabulary_that_the_job_tells(planned: Planned) -> None:
    before, after = planned(), planned(script=MEGATRON)
    learn(before)
    after.take_over(before.request)
    assert after.request == before.request, "the next one hears of it too"
    after.learn({"facts": {"padded_vocab_size": 1024}})
    assert after.request == before.request
    assert runs(after, SLOW) == runs(before, SLOW)


def test_what_is_computed_meanwhile_does_not_replace_what_is_taken_over(planned: Planned) -> None:
    before, after = planned(), planned()
    learn(before)
    found = after.with_measured(Measured(SLOW, 1, 50, 9.0), None)
    assert found is not None
    after.take_over(before.request)
    after.adopt(*found)
    assert after.request == before.request


@pytest.mark.parametrize(
    "wrong",
    [
        None, 7, [], [None, 2, None, [], []], [None, 2, None, [], 7, None],
        [None, 2, None, [], [], "x"], [None, 2, None, [], [], -1.0], [None, 2, None, [3], [], 1.0],
        [None, 2, None, [], [], 1.0, 2.0], [None, 2, None, [], [], 3.0, 1.0, 1.0],
        [None, 2, None, [[{"tp": 2}, None]], [], 1.0],
    ],
)  # fmt: skip
def test_what_nobody_has_asked_for_is_not_taken_over(planned: Planned, wrong: object) -> None:
    sizing = planned()
    was = sizing.request
    with pytest.raises(ValueError, match=r"is no "):
        sizing.take_over(JsonText.of(wrong))
    assert sizing.request == was


@pytest.mark.fault
def test_a_slip_of_the_planner_is_told_and_leaves_what_runs(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(*_: object) -> None:
        raise ZeroDivisionError("a slip")

    monkeypatch.setattr(preference.Preference, "order", order)
    said: list[str] = []
    sizing = planned("--planner", "cost", say=said.append)
    for _ in range(2):
        found = taken(sizing, FOUR, SLOW)
        assert found.degrees == SLOW
        assert "the planner cannot say: ZeroDivisionError('a slip')" in found.reason
    (line,) = said
    assert "event=planner failed" in line and "Traceback" in line


def test_a_person_may_keep_degrees_or_have_them_computed_from_the_start(planned: Planned) -> None:
    assert not planned("--planner", "keep").has_planner
    assert "by cost" in taken(planned("--planner", "cost")).reason


@pytest.mark.parametrize(
    ("config", "script", "why"),
    [
        ("", f"{MEGATRON} --padded-vocab-size 1024", "name it by \\[planner\\] gpu"),
        ('gpu = "abacus"', f"{MEGATRON} --padded-vocab-size 1024", "abacus"),
        ('gpu = "h100"', "train.py --lr 1", "\\[degrees\\]"),
        ('gpu = "h100"', MEGATRON, "--padded-vocab-size"),
        ('gpu = "v100"', f"{MEGATRON} --padded-vocab-size 1024", "bf16"),
    ],
)
def test_what_the_planner_lacks_is_said_where_it_was_asked_for(
    planned: Planned, config: str, script: str, why: str
) -> None:
    config = f"[planner]\n{config}\n"
    with pytest.raises(RefusedError, match=why) as refused:
        planned("--planner", "cost", config=config, script=script)
    assert "--planner keep" in str(refused.value)
    assert not planned(config=config, script=script).has_planner


def test_a_vocabulary_that_only_the_tokenizer_knows_is_learned_from_the_job(
    planned: Planned,
) -> None:
    sizing = planned(script=MEGATRON)
    assert not sizing.has_planner
    sizing.learn({"facts": {"padded_vocab_size": 50304}})
    assert sizing.has_planner


def left() -> tuple[Assignment, Assignment]:
    """Return four stages on host b and the new c, and what runs on a and b."""
    degrees = Degrees(2, 2, 1)
    ran, target = (
        Assignment(tuple((name, 2) for name in hosts), degrees, 1, "why") for hosts in ("ab", "bc")
    )
    return target, ran


def placed(sizing: Sizing) -> Assignment:
    return sizing.place(*left(), (("b", 2), ("c", 2)))


def test_the_bytes_of_its_own_model_say_where_the_hosts_of_a_megatron_job_stand(
    planned: Planned, sizing: Sizing
) -> None:
    found = placed(planned("--planner", "keep"))
    assert found.workers == (("c", 2), ("b", 2))
    assert re.search(r"hosts placed: \d+ bytes cross, \d+ in the order of joining", found.reason)
    unknown = planned(script=MEGATRON)  # its vocabulary is not known yet
    for job in (sizing, unknown):
        found = placed(job)
        assert found.workers == (("c", 2), ("b", 2)) and "% of what is wanted" in found.reason
    unknown.learn({"facts": {"padded_vocab_size": 1024}})
    assert "bytes cross" in placed(unknown).reason, "as the workers have told"


def test_a_plain_job_has_the_order_of_joining() -> None:
    spec = JobSpec.read(parse_options(["--nnodes", "1:2", "script.py"]))
    assert first_state(spec, Sizing(spec), 1, None).settings.place is keep_order


def test_a_slip_of_the_placement_is_told_and_hosts_stay_where_they_are(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def slip(*_: object) -> Assignment:
        raise ZeroDivisionError("a slip")

    monkeypatch.setattr(sizing_module, "make_place", lambda *_: slip)
    sizing = planned(say=said.append)
    assert placed(sizing).workers == left()[0].workers
    assert "event=not_placed ZeroDivisionError" in said[0]


def test_who_takes_over_knows_what_was_recomputed(planned: Planned) -> None:
    before, after = planned(), planned()
    learned(before, Measured(SLOW, 1, 50, 2.0, "full"), 10.0)
    before.exclude(replace(ran(FAST, "full"), offload="optimizer"))
    assert before.note_ran(replace(ran(SLOW), offload="optimizer-half"))
    after.take_over(before.request)
    assert after.request == before.request


LARGE = (
    "pretrain_gpt.py --num-layers 64 --hidden-size 5120 --num-attention-heads 40 --bf16 "
    "--seq-length 2048 --max-position-embeddings 2048 --padded-vocab-size 51200 "
    "--micro-batch-size 4 --global-batch-size 64 --use-distributed-optimizer"
)


def test_a_running_job_knows_the_memory_of_its_hosts(of_file: Callable[..., Sizing]) -> None:
    cost = '[planner]\ngpu = "a100-80gb"\nkind = "cost"\n'
    sizing = of_file(cost, script=LARGE)
    assert taken(sizing, FOUR).offload == "optimizer-half"
    sizing.learn({"facts": {"host_memory": 2e12}})
    assert taken(sizing, FOUR).offload == "optimizer-half"
    sizing.learn({"facts": {"host_memory": 64e9}})
    assert taken(sizing, FOUR).offload is None, "the smallest counts, and is too small"
    stated = of_file(f"{cost}host_memory_gb = 2000\n", script=LARGE)
    stated.learn({"facts": {"host_memory": 64e9}})
    assert taken(stated, FOUR).offload == "optimizer-half"


def test_a_person_may_ask_a_running_job_to_recompute_at_the_same_degrees(planned: Planned) -> None:
    sizing = planned()
    kept = taken(sizing, FOUR, SLOW)
    asked, _ = scaled(sizing, "tp1 pp1 recompute=full", FOUR, SLOW)
    assert asked is not None
    assert asked.degrees == kept.degrees == SLOW and asked.recompute == "full"
    assert not asked.is_same_as(kept)
    assert "recompute none -> full, as requested" in asked.reason
    full = planned(script=f"{MEGATRON} --recompute-granularity full")
    refused, why = scaled(full, "tp1 recompute=none", FOUR, SLOW)
    assert refused is None and "recompute=none cannot be had: the script has full" in why


def ratchet(sizing: Sizing) -> Sizing:
    """Return a job that began at DP2 and was asked for TP2, and has stepped in both."""
    for degrees in (Degrees(1, 1, 2), Degrees(2, 1, 1)):
        assert sizing.note_ran(ran(degrees))
        assert not sizing.note_ran(ran(degrees)), "it is known"
    return sizing


@pytest.mark.fault
def test_a_job_that_has_stepped_at_a_smaller_cut_goes_back_to_it(planned: Planned) -> None:
    sizing = ratchet(planned())
    sizing.rescale(None, None, "tp2 pp1")
    assert taken(sizing, ONE, Degrees(2, 1, 1)).degrees == Degrees(1, 1, 1)


@pytest.mark.fault
def test_what_has_run_is_known_after_a_takeover_and_after_all_processes_are_gone(
    planned: Planned,
) -> None:
    before = ratchet(planned())
    heir, restarted = planned(), planned()
    heir.take_over(before.request)
    assert heir.request == before.request
    restarted.learn({"facts": {"asked": before.request.value()}}, 7)
    for sizing in (heir, restarted):
        assert taken(sizing, ONE, Degrees(2, 1, 1)).degrees == Degrees(1, 1, 1)


@pytest.mark.fault
def test_a_start_of_the_same_job_takes_up_what_persons_asked_for_last(planned: Planned) -> None:
    said: list[str] = []
    before, other, after = planned(), planned(), planned(say=said.append)
    before.rescale(2, None, "tp2 pp1")
    after.learn({"facts": {"asked": before.request.value()}}, 7)
    after.learn({"facts": {"asked": other.request.value()}}, 5)  # an older state of another host
    assert taken(after).degrees == Degrees(2, 1, 1)
    assert any("--nproc 2 --degrees 'tp2 pp1'" in line for line in said)
    after.rescale(None, None, None)
    after.learn({"facts": {"asked": before.request.value()}}, 8)  # asked for something else since
    assert taken(after).degrees.world_size == 4


@pytest.mark.fault
def test_why_nothing_fits_is_said_with_the_way_out(planned: Planned) -> None:
    sizing = planned(script=f"{MEGATRON} --tensor-model-parallel-size 4")
    why = sizing.why_not(TWO, None)
    assert "TP4·PP1 does not fit on 2 ranks" in why and "nearest: 4" in why


def test_a_world_that_was_asked_for_and_is_not_there_is_no_way_out(planned: Planned) -> None:
    found = scaled(planned(), "tp4 pp1", TWO, Degrees(2, 1, 1), nproc=4)
    assert found == (None, "2 slots are there for 4 workers; start agents with 2 more")


def test_data_parallelism_that_a_model_sums_over_stays_that_of_the_first_round(
    planned: Planned,
) -> None:
    balanced = (
        "--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1"
    )
    sizing = planned(script=f"{MEGATRON} {balanced}")
    sizing.learn({"facts": {"first_share": [1, 2]}})
    assert scaled(sizing, "tp2 pp1", FOUR, Degrees(1, 1, 2))[0] is not None
    assert scaled(sizing, "tp1 pp1 dp4", FOUR, Degrees(1, 1, 2))[0] is None


@pytest.mark.fault
def test_a_layout_that_the_framework_refuses_is_not_offered(planned: Planned) -> None:
    sizing = planned()
    sizing.learn({"facts": {"refused_layouts": [[2, 1, 1, "its reason"]]}})
    refused, why = scaled(sizing, "tp2 pp1", FOUR, Degrees(1, 1, 4))
    assert refused is None and "the framework refuses TP2·PP1·DP2: its reason" in why
    assert scaled(sizing, "tp1 pp2", FOUR, Degrees(1, 1, 4))[0] is not None


def read(reports: list[dict[str, Any]]) -> tuple[Measured, ChangeTime | None]:
    """Return what is learned of a job that makes a step a second after changes of these reports."""
    seconds = iter(range(1000))
    sizing = SimpleNamespace(has_planner=True, micro_batch_size=1)
    watch = Calibrating(cast(Sizing, sizing), clock=lambda: float(next(seconds)))
    for report in reports:
        watch.changed(report)
    current = Assignment((("a", 4),), FAST, None, "")
    pace = Pace(step_s=1.0, write_s=10.0, start_s=30.0)
    for step in range(1000):
        job = SimpleNamespace(
            current=current, phase=Phase.RUNNING, round=1, newest=step,
            change=SimpleNamespace(pace=pace),
        )  # fmt: skip
        if (found := watch.look(cast(Job, job))) is not None:
            return found
    raise AssertionError("nothing was measured")


def test_the_bytes_of_the_last_change_are_told_apart() -> None:
    stop = {
        "seconds": {"snapshot": 8.0, "move": 12.0, "restore": 5.0, "relaunch": 6.0},
        "snapshot_proof_s": 0.1,
    }
    measured, change = read([stop])
    assert measured.degrees == FAST and measured.seconds == 1.0
    assert change == ChangeTime(fixed_s=16.0, moves_s=25.0)
    failure = {"seconds": {"snapshot": 3.0, "move": 1.0, "restore": 1.0}, "is_emergency": True}
    assert read([stop, failure])[1] == ChangeTime(fixed_s=31.0, moves_s=10.0)
    assert read([])[1] == ChangeTime(fixed_s=41.0)


@pytest.mark.parametrize("stated", ["", "global_batch_size = 12\n"])
def test_a_loops_word_that_it_weighs_its_losses_frees_dp_until_it_says_so_no_more(
    of_file: Callable[..., Sizing], stated: str
) -> None:
    sizing, hosts = of_file(f"[model]\n{stated}"), (("a", 3), ("b", 2))
    told = {"batch_sizes": [12], "is_weighted": False}
    sizing.learn({"facts": told})
    assert taken(sizing, hosts).degrees == Degrees(1, 1, 4) and not sizing.take_news()
    sizing.learn({"facts": {**told, "batch_sizes": [8, 16], "is_weighted": True}})
    assert sizing.take_news() and not sizing.take_news()
    sizing.rescale(5, None, "dp5")
    assert taken(sizing, hosts).degrees == Degrees(1, 1, 5)
    sizing.learn({"facts": told})
    assert not sizing.take_news() and taken(sizing, hosts).degrees == Degrees(1, 1, 4)


def test_no_word_of_a_loop_frees_the_dp_of_a_frameworks_job(of_file: Callable[..., Sizing]) -> None:
    flags = "--tensor-model-parallel-size 1 --global-batch-size 12 --micro-batch-size 1"
    script = f"pretrain_gpt.py {flags} --dataloader-type external"
    sizing = of_file("", script=script)
    sizing.learn({"facts": {"batch_sizes": [12], "is_weighted": True}})
    assert not sizing.take_news() and taken(sizing, (("a", 3), ("b", 2))).degrees.dp == 4


def test_shares_follow_the_measured_speeds_of_hosts_at_the_next_change(
    planned: Planned, of_file: Callable[..., Sizing]
) -> None:
    hosts, present = (("a", 1), ("b", 1)), Degrees(1, 1, 2)
    current = Assignment(hosts, present, None, "", paces=())

    def hear(sizing: Sizing, round: int, **seconds: float) -> list[str]:
        """Report three windows of each host, the last ones twice."""
        told = []
        for window in (1, 2, 3, 3):
            for host, each in seconds.items():
                told.append(sizing.note_pace(round, current, host, window, each))
        return [each for each in told if each]

    measured = of_file("[planner]\nshares = 'measured'", script=MEGATRON)
    assert measured.paced(current) == current
    assert hear(measured, 1, a=0.2, b=0.4, gone=9.0) == [
        "event=paces b=2.00: shares follow at the next change"
    ]
    found = measured.paced(replace(current, reason="why"))
    assert found.paces == (100, 200) and found.is_same_as(current)
    assert found.reason == "why; shares 5·3 by measured speeds"
    swapped = replace(current, workers=hosts[::-1])
    assert measured.paced(swapped).paces == (200, 100)
    assert measured.paced(replace(current, degrees=Degrees(1, 2, 1))).paces == ()
    chunks = replace(current, degrees=Degrees(1, 1, 2, vpp=2))
    assert measured.paced(chunks).paces == ()
    newcomer = replace(current, workers=(("a", 1), ("c", 1)))
    assert measured.paced(newcomer).paces == ()
    assert hear(measured, 2, a=0.2) == []  # b has yet to report
    assert measured.paced(current).paces == (100, 200)
    assert hear(measured, 3, a=0.2, b=0.2)[0].startswith("event=paces all alike")
    assert measured.paced(current).paces == ()
    even = of_file("", script=MEGATRON)
    assert even.paced(replace(current, paces=None)).paces is None
    with pytest.raises(UsageError, match="even, measured"):
        of_file("[planner]\nshares = 'fast'", script=MEGATRON)
