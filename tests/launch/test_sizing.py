"""A person's requests about a job's size hold wherever they fit; then what its planner computes."""

import re
from collections.abc import Callable

import pytest

from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import RefusedError
from scalai.core.job.membership import Assignment, keep_order
from scalai.core.messages.shared import JsonText
from scalai.core.planner import preference
from scalai.core.planner.meter import ChangeTime
from scalai.core.planner.preference import Measured
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.first_state import first_state
from scalai.launch.coordinator.sizing import Sizing
from support.membership_choice import ran

FOUR, TWO = (("a", 2), ("b", 2)), (("a", 2),)


@pytest.fixture
def sizing(tmp_path_factory: pytest.TempPathFactory) -> Sizing:
    config = tmp_path_factory.mktemp("sizing") / "elastic.toml"
    config.write_text('[degrees]\n4 = "tp2"\n2 = "tp1"\n[model]\nnum_attention_heads = 8\n')
    flags = ["--nnodes", "1:2", "--nproc-per-node", "2", "--elastic", str(config), "script.py"]
    return Sizing(JobSpec.read(parse_options(flags)))


def test_requested_degrees_hold_until_the_next_scale(sizing: Sizing) -> None:
    sizing.rescale(None, None, "tp4")
    first = sizing.assign()(FOUR, ran(Degrees(2, 1, 2)))
    again = sizing.assign()(FOUR, ran(Degrees(4, 1, 1)))
    assert first is not None and again is not None
    assert first.degrees == again.degrees == Degrees(4, 1, 1)
    sizing.rescale(None, None, None)
    back = sizing.assign()(FOUR, ran(Degrees(4, 1, 1)))
    assert back is not None
    assert back.degrees == Degrees(2, 1, 2)


def test_a_job_goes_on_where_requested_degrees_do_not_fit_any_more(sizing: Sizing) -> None:
    sizing.rescale(None, None, "tp4")
    assignment = sizing.assign()(TWO, ran(Degrees(4, 1, 1)))
    assert assignment is not None
    assert assignment.degrees == Degrees(1, 1, 2)


def test_a_request_that_does_not_fit_is_not_taken_for_another(sizing: Sizing) -> None:
    why: list[str] = []
    assert sizing.scaled(None, None, "tp4", why.append)(TWO, ran(Degrees(1, 1, 2))) is None


def test_who_takes_over_goes_by_what_persons_asked_for_and_what_ran_out_of_memory(
    sizing: Sizing, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = tmp_path_factory.mktemp("sizing") / "elastic.toml"
    config.write_text("[model]\nnum_attention_heads = 8\n")
    flags = ["--nnodes", "1:2", "--nproc-per-node", "2", "--elastic", str(config), "script.py"]
    spec = JobSpec.read(parse_options(flags))
    before, after = Sizing(spec), Sizing(spec)
    first = before.assign()(FOUR, None)
    assert first is not None
    before.exclude(first)
    before.rescale(3, 2, None)
    after.take_over(before.request)
    assert after.request == before.request
    for hosts in (FOUR, TWO):
        found = after.assign()(hosts, None)
        assert found == before.assign()(hosts, None)
        assert found is None or found.degrees != first.degrees


def test_a_limit_of_hosts_leaves_the_later_ones_idle(sizing: Sizing) -> None:
    sizing.rescale(None, 1, None)
    assignment = sizing.assign()(FOUR, None)
    assert assignment is not None
    assert assignment.workers == (("a", 2), ("b", 0))


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


@pytest.fixture
def gpu(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = tmp_path_factory.mktemp("planner") / "elastic.toml"
    config.write_text('[planner]\ngpu = "a100-80gb"\n')
    return str(config)


def of_file(
    config: str,
    *flags: str,
    script: str = f"{MEGATRON} --padded-vocab-size 1024",
    say: Callable[[str], object] = print,
) -> Sizing:
    given = ["--nnodes", "1:2", "--nproc-per-node", "2", "--elastic", config, *flags]
    return Sizing(JobSpec.read(parse_options([*given, *script.split()])), say)


def reasons(sizing: Sizing) -> str:
    """Return what it says of what it takes instead of the slow layout."""
    found = sizing.assign()(FOUR, ran(SLOW))
    assert found is not None
    return found.reason


def runs(sizing: Sizing, present: Degrees | None) -> Degrees:
    found = sizing.assign()(FOUR, None if present is None else ran(present))
    assert found is not None
    return found.degrees


def test_degrees_are_kept_until_two_layouts_were_measured(gpu: str) -> None:
    sizing = of_file(gpu)
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


def test_who_takes_over_knows_what_was_measured(gpu: str) -> None:
    before, after = of_file(gpu), of_file(gpu)
    learn(before)
    after.take_over(before.request)
    assert after.request == before.request
    assert runs(after, SLOW) == runs(before, SLOW) != SLOW


def test_who_takes_over_computes_beside_the_job_what_was_measured(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = of_file(gpu), of_file(gpu)
    learn(before)
    with monkeypatch.context() as patched:
        patched.setattr(preference, "calibrate", lambda x, seconds: pytest.fail("in the lock"))
        after.take_over(before.request)
    found = after.recalibrated()
    assert found is not None
    after.adopt(*found)
    assert after.recalibrated() is None
    assert reasons(after) == reasons(before), "it predicts what its predecessor did"


def test_who_takes_over_knows_what_a_change_takes(gpu: str) -> None:
    before, after = of_file(gpu), of_file(gpu)
    learned(before, Measured(SLOW, 1, 50, 2.0), 321.0)
    after.take_over(before.request)
    learned(after, Measured(FAST, 1, 50, 1.0), None)
    assert "a change costs 321 s" in reasons(after)


def test_what_was_measured_waits_for_a_vocabulary_that_the_job_tells(gpu: str) -> None:
    before, after = of_file(gpu), of_file(gpu, script=MEGATRON)
    learn(before)
    after.take_over(before.request)
    assert after.request == before.request, "the next one hears of it too"
    after.learn({"facts": {"padded_vocab_size": 1024}})
    assert after.request == before.request
    assert runs(after, SLOW) == runs(before, SLOW)


def test_what_is_computed_meanwhile_does_not_replace_what_is_taken_over(gpu: str) -> None:
    before, after = of_file(gpu), of_file(gpu)
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
def test_what_nobody_has_asked_for_is_not_taken_over(gpu: str, wrong: object) -> None:
    sizing = of_file(gpu)
    was = sizing.request
    with pytest.raises(ValueError, match=r"is no "):
        sizing.take_over(JsonText.of(wrong))
    assert sizing.request == was


@pytest.mark.fault
def test_a_slip_of_the_planner_is_told_and_leaves_what_runs(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(*_: object) -> None:
        raise ZeroDivisionError("a slip")

    monkeypatch.setattr(preference.Preference, "order", order)
    said: list[str] = []
    sizing = of_file(gpu, "--planner", "cost", say=said.append)
    for _ in range(2):
        found = sizing.assign()(FOUR, ran(SLOW))
        assert found is not None
        assert found.degrees == SLOW
        assert "the planner cannot say: ZeroDivisionError('a slip')" in found.reason
    (line,) = said
    assert "event=planner failed" in line and "Traceback" in line


def test_a_person_may_keep_degrees(gpu: str) -> None:
    assert not of_file(gpu, "--planner", "keep").has_planner


def test_a_person_may_have_them_computed_from_the_start(gpu: str) -> None:
    found = of_file(gpu, "--planner", "cost").assign()(FOUR, None)
    assert found is not None
    assert "by cost" in found.reason


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
    config: str, script: str, why: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("planner") / "elastic.toml"
    path.write_text(f"[planner]\n{config}\n")
    with pytest.raises(RefusedError, match=why) as refused:
        of_file(str(path), "--planner", "cost", script=script)
    assert "--planner keep" in str(refused.value)
    assert not of_file(str(path), script=script).has_planner


def test_a_vocabulary_that_only_the_tokenizer_knows_is_learned_from_the_job(gpu: str) -> None:
    sizing = of_file(gpu, script=MEGATRON)
    assert not sizing.has_planner
    sizing.learn({"facts": {"padded_vocab_size": 50304}})
    assert sizing.has_planner


def left(degrees: Degrees) -> tuple[Assignment, Assignment]:
    """Return what runs on hosts a and b, and the same degrees on b and the new c."""
    ran, target = (
        Assignment(tuple((name, 2) for name in hosts), degrees, 1, "why") for hosts in ("ab", "bc")
    )
    return target, ran


def test_the_bytes_of_its_own_model_say_where_the_hosts_of_a_megatron_job_stand(gpu: str) -> None:
    target, ran = left(Degrees(2, 2, 1))
    found = of_file(gpu, "--planner", "keep").place(target, ran, (("b", 2), ("c", 2)))
    assert found.workers == (("c", 2), ("b", 2))
    assert re.search(r"hosts placed: \d+ bytes cross, \d+ in the order of joining", found.reason)


def test_of_a_model_that_no_flag_states_shares_are_counted(gpu: str, sizing: Sizing) -> None:
    target, ran = left(Degrees(2, 2, 1))
    for job in (sizing, of_file(gpu, script=MEGATRON)):  # the vocabulary is not known yet
        found = job.place(target, ran, (("b", 2), ("c", 2)))
        assert found.workers == (("c", 2), ("b", 2)) and "% of what is wanted" in found.reason


def test_what_the_workers_have_told_makes_it_bytes(gpu: str) -> None:
    target, ran = left(Degrees(2, 2, 1))
    job = of_file(gpu, script=MEGATRON)
    job.learn({"facts": {"padded_vocab_size": 1024}})
    assert "bytes cross" in job.place(target, ran, (("b", 2), ("c", 2))).reason


def test_a_plain_job_has_the_order_of_joining() -> None:
    spec = JobSpec.read(parse_options(["--nnodes", "1:2", "script.py"]))
    assert first_state(spec, Sizing(spec), 1, None).settings.place is keep_order


def test_a_slip_of_the_placement_is_told_and_hosts_stay_where_they_are(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    sizing = of_file(gpu, say=said.append)

    def slip(*_: object) -> Assignment:
        raise ZeroDivisionError("a slip")

    monkeypatch.setattr(sizing, "_place", slip)
    ran = Assignment((("a", 2), ("b", 2)), Degrees(2, 2, 1), 1, "")
    target = Assignment((("b", 2), ("c", 2)), Degrees(2, 2, 1), 1, "")
    assert sizing.place(target, ran, (("b", 2), ("c", 2))) is target
    assert "event=not_placed ZeroDivisionError" in said[0]


def test_who_takes_over_knows_what_was_recomputed(gpu: str) -> None:
    before, after = of_file(gpu), of_file(gpu)
    learned(before, Measured(SLOW, 1, 50, 2.0, "full"), 10.0)
    before.exclude(ran(FAST, "full"))
    after.take_over(before.request)
    assert after.request == before.request


def test_a_person_may_ask_a_running_job_to_recompute_at_the_same_degrees(gpu: str) -> None:
    sizing = of_file(gpu)
    kept = sizing.assign()(FOUR, ran(SLOW))
    asked = sizing.scaled(None, None, "tp1 pp1 recompute=full", print)(FOUR, ran(SLOW))
    assert kept is not None and asked is not None
    assert asked.degrees == kept.degrees == SLOW and asked.recompute == "full"
    assert not asked.is_same_as(kept)
    assert "recompute none -> full, as requested" in asked.reason
    why: list[str] = []
    script = f"{MEGATRON} --recompute-granularity full"
    full = of_file(gpu, script=script).scaled(None, None, "tp1 recompute=none", why.append)
    assert full(FOUR, ran(SLOW)) is None
    assert "recompute=none cannot be had: the script has full" in why[-1]


ONE = (("a", 1),)


def ratchet(config: str) -> Sizing:
    """Return a job that began at DP2 and was asked for TP2, and has stepped in both."""
    sizing = of_file(config)
    for degrees in (Degrees(1, 1, 2), Degrees(2, 1, 1)):
        assert sizing.note_ran(ran(degrees))
        assert not sizing.note_ran(ran(degrees)), "it is known"
    return sizing


@pytest.mark.fault
def test_a_job_that_has_stepped_at_a_smaller_cut_goes_back_to_it(gpu: str) -> None:
    sizing = ratchet(gpu)
    sizing.rescale(None, None, "tp2 pp1")
    found = sizing.assign()(ONE, ran(Degrees(2, 1, 1)))
    assert found is not None and found.degrees == Degrees(1, 1, 1)


@pytest.mark.fault
def test_what_has_run_is_known_after_a_takeover_and_after_all_processes_are_gone(gpu: str) -> None:
    before = ratchet(gpu)
    heir, restarted = of_file(gpu), of_file(gpu)
    heir.take_over(before.request)
    assert heir.request == before.request
    restarted.learn({"facts": {"asked": before.request.value()}}, 7)
    for sizing in (heir, restarted):
        found = sizing.assign()(ONE, ran(Degrees(2, 1, 1)))
        assert found is not None and found.degrees == Degrees(1, 1, 1)


@pytest.mark.fault
def test_a_start_of_the_same_job_takes_up_what_persons_asked_for_last(gpu: str) -> None:
    said: list[str] = []
    before, other, after = of_file(gpu), of_file(gpu), of_file(gpu, say=said.append)
    before.rescale(2, None, "tp2 pp1")
    after.learn({"facts": {"asked": before.request.value()}}, 7)
    after.learn({"facts": {"asked": other.request.value()}}, 5)  # an older state of another host
    found = after.assign()(FOUR, None)
    assert found is not None and found.degrees == Degrees(2, 1, 1)
    assert any("--nproc 2 --degrees 'tp2 pp1'" in line for line in said)
    after.rescale(None, None, None)
    after.learn({"facts": {"asked": before.request.value()}}, 8)  # asked for something else since
    found = after.assign()(FOUR, None)
    assert found is not None and found.degrees.world_size == 4


@pytest.mark.fault
def test_why_nothing_fits_is_said_with_the_way_out(gpu: str) -> None:
    sizing = of_file(gpu, script=f"{MEGATRON} --tensor-model-parallel-size 4")
    why = sizing.why_not(TWO, None)
    assert "TP4·PP1 does not fit on 2 ranks" in why and "nearest: 4" in why


def test_a_world_that_was_asked_for_and_is_not_there_is_no_way_out(gpu: str) -> None:
    why: list[str] = []
    assert of_file(gpu).scaled(4, None, "tp4 pp1", why.append)(TWO, ran(Degrees(2, 1, 1))) is None
    assert why == ["2 slots are there for 4 workers; start agents with 2 more"]


def test_data_parallelism_that_a_model_sums_over_stays_that_of_the_first_round(gpu: str) -> None:
    balanced = (
        "--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1"
    )
    sizing = of_file(gpu, script=f"{MEGATRON} {balanced}")
    sizing.learn({"facts": {"first_share": [1, 2]}})
    assert sizing.scaled(None, None, "tp2 pp1", print)(FOUR, ran(Degrees(1, 1, 2))) is not None
    assert sizing.scaled(None, None, "tp1 pp1 dp4", print)(FOUR, ran(Degrees(1, 1, 2))) is None


@pytest.mark.fault
def test_a_layout_that_the_framework_refuses_is_not_offered(gpu: str) -> None:
    sizing, why = of_file(gpu), list[str]()
    sizing.learn({"facts": {"refused_layouts": [[2, 1, 1, "its reason"]]}})
    assert sizing.scaled(None, None, "tp2 pp1", why.append)(FOUR, ran(Degrees(1, 1, 4))) is None
    assert "the framework refuses TP2·PP1·DP2: its reason" in why[0]
    assert sizing.scaled(None, None, "tp1 pp2", print)(FOUR, ran(Degrees(1, 1, 4))) is not None
