"""Faults into a running job: their schedule, what they do to processes, files and logs, and the
verdict. The job itself is a whole one elsewhere (``end_to_end/test_chaos.py``)."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.errors import UsageError
from scalai.launch import cli
from scalai.launch.chaos import job_processes as processes
from scalai.launch.chaos.fault_run import alone
from scalai.launch.chaos.injectors import TABLE
from scalai.launch.chaos.kinds import (
    KINDS,
    SIGNALS,
    TRIGGERS,
    At,
    Effect,
    Fault,
    Loss,
    Target,
    most_steps_lost,
    parse,
    schedule,
    struck,
)
from scalai.launch.chaos.scene import JobLog
from scalai.launch.chaos.verdicts import (
    FaultOutcome,
    ReportedRound,
    Verdict,
    compare,
    draw,
    problems,
    step_to_pass,
    table,
    to_json,
)
from scalai.launch.commands.chaos import read_losses
from support.chaos_campaign import PARTS, united
from support.waiting import wait_until

DEADLINE_S = 30.0
STAYS = "from support.waiting import stay; stay()"

# ------------------------------------------------------------------ kinds and schedules


def test_every_kind_station_and_signal_is_known_to_the_injectors_and_reached_by_the_code() -> None:
    assert TABLE.keys() == KINDS.keys()
    assert SIGNALS.keys() <= KINDS.keys()
    assert all(kind.station in {"", *TRIGGERS} for kind in KINDS.values())
    assert all(name in {"", *KINDS} for name in TRIGGERS.values())
    root = Path(__file__).parents[2]
    files = [path for top in ("plugin", "launch") for path in (root / top).rglob("*.py")]
    lines = [line for path in files for line in path.read_text().splitlines() if "reached(" in line]
    missing = [each for each in TRIGGERS if not any(f'"{each}"' in line for line in lines)]
    assert len(lines) > 15 and not missing


ALL = tuple(map(parse, KINDS))
HOSTS = st.dictionaries(
    st.sampled_from([f"h{number}" for number in range(9)]), st.integers(1, 8), min_size=4
)


def of(
    seed: int, hosts: dict[str, int], replicas: int = 1, rounds: int = 1, every: int = 20
) -> tuple[Fault, ...]:
    return schedule(seed, ALL, hosts, least_hosts=1, replicas=replicas, every=every, rounds=rounds)


@given(st.integers(), HOSTS, st.integers(0, 2), st.integers(1, 3))
def test_every_kind_comes_as_often_as_it_should_and_takes_no_more_copies_than_it_says(
    seed: int, hosts: dict[str, int], replicas: int, rounds: int
) -> None:
    faults = of(seed, hosts, replicas, rounds)
    assert faults == of(seed, dict(reversed(hosts.items())), replicas, rounds)
    names = [fault.kind.name for fault in faults]
    assert sorted(names) == sorted([*KINDS] * rounds)
    assert all({*fault.hosts} <= hosts.keys() and fault.steps >= 20 for fault in faults)
    for fault in faults:
        count = len(set(fault.hosts))
        assert count < len(hosts), "somebody is left"
        if fault.kind.name in {"kill-host", "kill-hosts", "kill-more-hosts", "damage-disk"}:
            is_on_disk = fault.kind.loss is Loss.DISK
            assert count == replicas + 1 if is_on_disk else count <= max(1, replicas)
        if fault.kind.target is Target.WORKER:
            assert 0 <= fault.worker < hosts[fault.hosts[0]]


def test_another_seed_gives_another_schedule_and_what_ends_the_job_comes_last() -> None:
    made = [of(seed, dict.fromkeys("abcd", 2)) for seed in range(20)]
    assert len({tuple(map(str, each)) for each in made}) == 20
    for faults in made:
        ends = [fault.kind.effect is Effect.ENDS for fault in faults]
        assert ends == sorted(ends) and any(ends)


@pytest.mark.parametrize(
    ("kind", "least", "why"),
    [("kill-more-hosts", 1, "strikes 2 of 2 hosts"), ("kill-agent", 2, "the job needs 2")],
)
def test_more_hosts_than_there_are_cannot_be_struck(kind: str, least: int, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        schedule(0, [parse(kind)], {"a": 1, "b": 1}, least_hosts=least, replicas=1, every=5)
    assert struck(KINDS["kill-hosts"], 2) == 2 and struck(KINDS["kill-more-hosts"], 2) == 3


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("kill-worker", At()),
        ("kill-worker@step=120", At(120)),
        ("kill-worker@s=2.5", At(after_s=2.5)),
        ("stop-agent@station=commit", At(station="commit")),
        ("exit-worker@step=3", At(3, station="step")),
        *((text, None) for text in (
            "nonsense", "kill-worker@step=x", "kill-worker@station=nowhere",
            "full-disk@station=commit", "exit-worker@station=restore", "kill-worker@when=3",
        )),
    ],
)  # fmt: skip
def test_a_fault_is_read_as_it_was_written_or_refused(text: str, at: At | None) -> None:
    if at is None:
        with pytest.raises(UsageError):
            parse(text)
    else:
        found = parse(text)
        assert found.kind is KINDS[text.partition("@")[0]] and found.at == at


@pytest.mark.parametrize(
    ("kind", "every", "since_generation", "since_disk", "lost"),
    [
        ("term-agent", 7, 3, 40, 0),
        ("kill-worker", 7, 3, 40, 14),
        ("stop-agent", 7, 3, 40, 15),
        ("stop-agent", None, 30, None, 31),
        ("kill-worker", None, 30, None, 31),
        ("kill-more-hosts", 7, 3, 40, 54),
        ("kill-more-hosts", 7, 3, None, None),
    ],
)
def test_what_may_be_lost_follows_from_what_outlives_the_fault(
    kind: str, every: int | None, since_generation: int, since_disk: int | None, lost: int | None
) -> None:
    assert most_steps_lost(KINDS[kind], every, since_generation, since_disk) == lost


# ------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nowhere"], 2, ["/nowhere"]),
        (["empty"], 2, ["no agent of job 'empty' runs on this machine"]),
        (["nowhere", "--faults", "kill-worker,eat-worker"], 2, ["eat-worker", "kill-agent"]),
        (["--list"], 0, [*KINDS]),
    ],
    ids=["no job", "no agent", "no such kind", "list"],
)
def test_without_a_job_it_says_where_it_was_looked_for(
    words: list[str], code: int, says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        cli.main(["chaos", *words, "--store-dir", str(tmp_path)])
    said = "".join(capsys.readouterr())
    assert (ended.value.code or 0) == code and all(each in said for each in says)


def test_two_commands_at_once_are_refused(tmp_path: Path) -> None:
    with alone(tmp_path):
        with pytest.raises(UsageError, match="another command"), alone(tmp_path):
            pass
    with alone(tmp_path):
        assert not list(tmp_path.iterdir()), "nothing is left in the job's folder"


# ------------------------------------------------------------------ processes, files and logs


@contextmanager
def ended(process: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def test_a_process_is_started_again_as_it_was(tmp_path: Path) -> None:
    script = "import os, pathlib; pathlib.Path('told').write_text(os.environ['ITS'] + ' ' "
    script += f"+ os.getcwd()); print('begun', flush=True); {STAYS}"
    told, log = tmp_path / "told", tmp_path / "log"
    with log.open("ab") as file:
        first = subprocess.Popen(
            [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "ITS": "own"},
            stdout=file, stderr=file,
        )  # fmt: skip
    wait_until(lambda: told.exists() and told.read_text() != "", "it is told")
    command = processes.AgentCommand.of(first.pid)
    processes.end([first.pid])
    first.wait(DEADLINE_S)
    told.unlink()
    with ended(command.start()) as second:
        wait_until(lambda: told.exists() and told.read_text() == f"own {tmp_path}", "told again")
        wait_until(lambda: log.read_text().count("begun") == 2, "it logs to the same file")
        assert os.getsid(second.pid) != os.getsid(0), "it outlives the command"


def test_a_process_is_seen_with_its_flags_and_one_that_is_gone_is_no_error() -> None:
    stays = [sys.executable, "-c", STAYS]
    with ended(subprocess.Popen([*stays, "--durable_dir=/d", "--nnodes", "1:3"])) as process:
        wait_until(lambda: processes.flag(process.pid, "--nnodes") == "1:3", "its flags")
        assert processes.flag(process.pid, "--durable-dir") == "/d"
        assert processes.flag(process.pid, "--replicas") is None
        command = processes.AgentCommand.of(process.pid).with_flag("--durable-dir", "/e")
        assert command.with_flag("--nnodes", "2").words[3:] == (
            "--durable-dir", "/e", "--nnodes", "2",
        )  # fmt: skip
        assert command.with_flag("--job", "j").words[3:5] == ("--job", "j")
        processes.send(process.pid, signal.SIGSTOP)
        wait_until(lambda: processes.state(process.pid) == "T", "it stands still")
    processes.send(process.pid, signal.SIGCONT)
    assert processes.state(process.pid) == "X" and not processes.environment(process.pid)


def test_half_a_line_of_a_log_is_left_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    log = JobLog([path])
    with path.open("a") as file:
        print("event=lost ho", end="", file=file, flush=True)
        log.look()
        assert log.text == ""
        print("st=a", file=file, flush=True)
        log.look()
    assert log.text == "event=lost host=a\n"


def test_a_torn_line_of_losses_is_passed_over_and_a_wrong_key_is_not(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert read_losses(path, "loss") == [(1, 2.5)]
    with pytest.raises(UsageError, match="line 1: no 'step' and 'sum'"):
        read_losses(path, "sum")
    with pytest.raises(UsageError, match="JSON lines"):
        read_losses(tmp_path / "nothing", "loss")


PROGRAM = """
import os, sys
from scalai.runtime.failpoints import here, reached
here({"0": os.getpid(), "h": 1})
try:
    reached(sys.argv[1])
except MemoryError as error:
    print("raised", error)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("armed", "code", "is_reached"),
    [
        ("step:0:exit 7", 7, True),
        ("step:0:raise MemoryError", 3, True),
        ("step:0:SIGKILL", -signal.SIGKILL, True),
        ("update:0:exit 7", 0, False),
        ("step:h:exit 7", 0, False),
        ("step:1:exit 7", 0, False),
    ],
)
def test_a_process_is_struck_where_it_was_said(
    tmp_path: Path, armed: str, code: int, is_reached: bool
) -> None:
    """Nobody else than the process that was named exits or raises."""
    (tmp_path / "point").write_text(armed)

    def ends(command: Sequence[str]) -> int:
        variables = {**os.environ, "SCALAI_FAILPOINT": str(tmp_path / "point")}
        return subprocess.run(command, env=variables, timeout=DEADLINE_S, check=False).returncode

    assert ends([sys.executable, "-c", PROGRAM, "step"]) == code
    assert (tmp_path / "point.reached").exists() == is_reached
    assert ends([sys.executable, "-c", PROGRAM, "step"]) == 0, "once"


# ------------------------------------------------------------------ verdicts


def fault(name: str = "kill-worker") -> Fault:
    return Fault(KINDS[name], ("a",), 0, At(), 20)


def begun(steps_lost: int = 3, noticed_s: float = 0.2) -> ReportedRound:
    return ReportedRound("rank 0 was killed", 14, steps_lost, noticed_s, 1.5, {"relaunch": 1.0})


GOOD = FaultOutcome(fault(), 40, "was killed by SIGKILL", 0.3, (begun(),), 4.0, 14)
NOTED = FaultOutcome(fault("full-disk"), 40, "event=not_archived", 0.3, (), 4.0, 0)


def test_a_job_that_has_gone_back_trains_again_before_it_has_made_up_for_what_was_lost() -> None:
    """Who loses 400 steps needs minutes for them, and trains all the same."""
    begun = ReportedRound("a worker was killed", 288, 415, 0.1, 5.0, {})
    assert step_to_pass(703, []) == step_to_pass(703, [replace(begun, step=None)]) == 703
    assert step_to_pass(703, [replace(begun, step=100), begun]) == 288
    assert step_to_pass(703, [replace(begun, step=710)]) == 703


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (GOOD, ""),
        (NOTED, ""),
        (replace(GOOD, sign=""), "not seen"),
        (FaultOutcome(fault()), "did not strike"),
        (replace(GOOD, back_s=None), "on all hosts"),
        (replace(GOOD, rounds=(begun(15),)), "15 steps"),
        (replace(GOOD, rounds=()), "no round"),
        (replace(NOTED, rounds=(begun(0),)), "cost a round"),
    ],
)
def test_what_was_seen_and_cost_no_more_than_stated_passed(
    outcome: FaultOutcome, problem: str
) -> None:
    found = problems(outcome)
    assert any(problem in each for each in found) if problem else not found
    assert GOOD.detect_s == 0.2 and NOTED.detect_s == 0.3


def test_a_fault_that_cannot_be_injected_neither_passes_nor_fails() -> None:
    skipped = FaultOutcome(fault("slow-link"), skipped="no link")
    verdict = Verdict(0, (GOOD, skipped))
    assert verdict.holds and verdict.figures()["faults"] == 1
    assert verdict.figures()["skipped"] == {"slow-link": "no link"}
    assert not Verdict(0, (skipped,)).holds, "nothing was injected"


def test_a_kind_passes_only_where_all_of_its_faults_do() -> None:
    verdict = Verdict(0, (GOOD, replace(GOOD, rounds=(begun(99),)), NOTED))
    figures = verdict.figures()
    assert (figures["faults"], figures["passed"], figures["failed"]) == (2, 1, ["kill-worker"])
    assert figures["steps_lost_max"]["kill-worker"] == {"lost": 99, "limit": 14}
    assert not verdict.holds and "NOT as stated" in table(verdict)


def test_one_step_that_differs_fails_all_though_it_was_made_again() -> None:
    reference = {1: 5, 2: 7, 3: 9}
    same = compare([(1, 5), (2, 7), (2, 7), (3, 9)], reference)
    assert (same.steps, same.again, same.wrong) == (3, 1, ())
    wrong: list[list[tuple[int, float]]] = [
        [(1, 5), (2, 8)], [(1, 5), (2, 8), (2, 7)], [(1, 5), (3, 9)],
        [(1, 5), (2, 7), (3, 9), (4, 1)], [],
    ]  # fmt: skip
    for made in wrong:
        found = compare(made, reference)
        assert found.wrong and Verdict(0, (GOOD,), found).figures()["passed"] == 0


def test_final_states_that_differ_or_are_missing_fail_all() -> None:
    assert Verdict(0, (GOOD,), None, ({"w": 1}, {"w": 1})).holds
    for own, other in (({"w": 1}, {"w": 2}), ({"w": 1}, {"w": 1, "v": 3}), ({}, {})):
        assert not Verdict(0, (GOOD,), None, (own, other)).holds


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 20), st.booleans()), min_size=1),
)
def test_the_figures_never_count_more_passed_than_seen(
    found: list[tuple[int, int, bool]],
) -> None:
    names = list(KINDS)
    outcomes = tuple(
        replace(
            GOOD, fault=fault(names[number % len(names)]), rounds=(begun(lost),),
            sign="said" if is_seen else "",
        )
        for number, lost, is_seen in found
    )  # fmt: skip
    figures = Verdict(1, outcomes).figures()
    assert figures["passed"] <= figures["faults"] <= len({e.fault.kind for e in outcomes})
    assert all(to_json(each)["kind"] in KINDS for each in outcomes)


def test_a_verdict_is_drawn(tmp_path: Path) -> None:
    path = draw(Verdict(0, (GOOD,)).to_json(), tmp_path / "verdict.png")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


def test_a_kind_that_failed_without_a_sign_counts_as_a_fault_of_the_campaign() -> None:
    verdict = {
        "outcomes": [{"kind": "kill-host", "sign": "seen"}, {"kind": "full-disk", "sign": ""}],
        "failed": ["full-disk"], "skipped": {}, "steps_lost_max": {}, "differs": [],
        "detect_s_max": {},
    }  # fmt: skip
    found = united([(PARTS[0], verdict)])
    assert (found["faults"], found["passed"], found["failed"]) == (2, 1, ["full-disk"])
