"""Jobs with a DP that does not divide the batch, or a PP that does not divide the layers: what
their steps consume, learn and count is what one rank's do. Megatron-LM's own pretrain_gpt.py with
its evaluations, and a DeepSpeed script that knows nothing of Scalai."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support import megatron_lm_job
from support.accelerator import ACCELERATOR
from support.agents import Agents
from support.deepspeed_elastic import (
    AUTOTP_CUTS,
    arguments,
    check,
    config,
    lines_of,
    run_alone,
    train_through,
)
from support.ledgers import read_ledger
from support.megatron_lm_job import (
    CHECKOUT,
    MODEL,
    Job,
    check_same_steps,
    evaluations,
    make_dataset,
)
from support.slow_pretrain_gpt import passes_of

STEPS, BEFORE = 40, 4
"""Steps of a job, and those before it is changed."""
SHARDED = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 20000"
)
BY_SAMPLES = "--rampup-batch-size 8 4 40 --train-samples 200"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
    "--disable-bias-linear --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)

pytestmark = pytest.mark.timeout(1800)


@dataclass(frozen=True, slots=True)
class Case:
    """A job on ``ranks`` ranks, changed to ``target``; ``alone`` are ranks of its first degrees
    without replicas: weights begin by TP, PP and EP."""

    name: str
    batch: int
    ranks: int
    first: str
    target: int
    then: str
    flags: str = ""
    tolerance: float = 1e-6
    ends: str = f"--train-iters {STEPS}"
    alone: int = 1
    is_back: bool = False
    """Whether it changes back once more."""


CASES = [
    Case("DP3 of 8 to DP2", 8, 3, "tp1 pp1", 2, "tp1 pp1"),
    Case("DP3 of 8 to DP2 and back", 8, 3, "tp1 pp1", 2, "tp1 pp1", SHARDED,
         ends="--train-iters 80", is_back=True),
    Case("DP3 of 16 to PP2", 16, 3, "tp1 pp1", 2, "tp1 pp2", "--calculate-per-token-loss"),
    Case("a growing batch", 16, 3, "tp1 pp1", 2, "tp1 pp1", BY_SAMPLES, ends=""),
    Case("in random order", 8, 3, "tp1 pp1", 2, "tp1 pp1",
         "--dataloader-type cyclic --no-data-sharding"),
    Case("DP5 of 8 to DP3 of 8", 8, 5, "tp1 pp1 dp5", 3, "tp1 pp1", SHARDED),
    Case("TP2, DP3 of 8", 8, 6, "tp2 pp1", 4, "tp2 pp1",
         "--sequence-parallel --padded-vocab-size 288", alone=2),
    Case("PP2, DP3 of 16, in virtual stages", 16, 6, "tp1 pp2 vpp2", 3, "tp1 pp1",
         "--num-virtual-stages-per-pipeline-rank 2", alone=2),
    Case("experts over replicas", 16, 6, "tp1 pp1 ep2", 4, "tp1 pp1 ep2", EXPERTS,
         alone=2),
    Case("experts, recomputed, in a pipeline", 8, 6, "tp1 pp2 recompute=full", 3, "tp1 pp1",
         EXPERTS.replace("--expert-model-parallel-size 2", ""), alone=2),
    Case("further tokens", 8, 3, "tp1 pp1", 2, "tp1 pp1",
         "--mtp-num-layers 1 --position-embedding-type rope"),
    Case("7 layers, PP3 to PP2 in virtual stages", 8, 3, "tp1 pp3", 2, "tp1 pp2 vpp2",
         "--num-layers 7", alone=3),
    Case("7 layers and further tokens, PP3 to PP2 in virtual stages", 8, 3, "tp1 pp3", 2,
         "tp1 pp2 vpp2", "--num-layers 7 --mtp-num-layers 1 --position-embedding-type rope "
         "--untie-embeddings-and-output-weights", alone=3),
    Case("stated ends, PP3 to PP2 and back", 8, 3, "tp1 pp3", 2, "tp1 pp2",
         "--num-layers 7 --pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1 "
         "--decoder-last-pipeline-num-layers 2 --clip-grad 0 "
         "--untie-embeddings-and-output-weights", 0.0, ends="--train-iters 80", alone=3,
         is_back=True),
    Case("an embedding that counts as a layer, PP3 to PP2 in virtual stages", 8, 3, "tp1 pp3", 2,
         "tp1 pp2 vpp2", "--num-layers 7 --account-for-embedding-in-pipeline-split "
         "--untie-embeddings-and-output-weights", alone=3),
    Case("bf16", 8, 3, "tp1 pp1", 2, "tp1 pp2", "--bf16", 2e-4, ends="--train-iters 16"),
]  # fmt: skip


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Give the list of jobs that end with the test."""
    found: list[Job] = []
    yield found
    for job in found:
        job.stop()


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.skipif(
    megatron_lm_job.skip_reason() is not None, reason=str(megatron_lm_job.skip_reason())
)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_job_with_uneven_shares_learns_what_one_rank_does(
    case: Case, tmp_path: Path, jobs: list[Job]
) -> None:
    model = MODEL.replace("--global-batch-size 12", f"--global-batch-size {case.batch}")
    if not case.ends:
        model = model.replace("--lr-decay-iters 100", "--lr-decay-samples 1200")
    make_dataset(tmp_path / "text")
    flags = [
        *case.ends.split(), *case.flags.split(), "--data-path", str(tmp_path / "text"),
        "--split", "90,5,5", "--vocab-size", "256", "--data-cache-path", str(tmp_path / "cache"),
        "--eval-interval", "6",
    ]  # fmt: skip

    def start(name: str, ranks: int, degrees: dict[int, str]) -> Job:
        jobs.append(
            Job(tmp_path / name, ranks, degrees, flags, model=model, settings="standby = 'never'")
        )
        return jobs[-1]

    alone = start("alone", case.alone, {case.alone: case.first.partition(" dp")[0]})
    alone.finish()
    changed = start("changed", case.ranks, {case.ranks: case.first, case.target: case.then})
    changed.wait_for_step(BEFORE)
    changed.scale(case.target)
    if case.is_back:
        changed.wait_until(lambda: changed.log.count("event=resized") == 1, "the change")
        changed.scale(case.ranks)
    changed.finish()
    expected, found = alone.ledger(), changed.ledger()
    assert list(found) == list(expected)
    assert len({entry.round for entry in found.values()}) == 2 + case.is_back, changed.log
    check_same_steps(found, expected, case.tolerance)
    assert changed.verified() == {"is_kept": True, "breaks": [], "notes": []}
    assert evaluations(changed).keys() == evaluations(alone).keys() != set()
    for step, loss in evaluations(changed).items():
        assert loss == pytest.approx(evaluations(alone)[step], rel=case.tolerance), step


@dataclass(frozen=True, slots=True)
class ZeroCase:
    """A DeepSpeed job through ``worlds``, the widest first. ``world`` ranks make ``passes`` in a
    step, fillers included."""

    stage: int
    worlds: tuple[int, ...]
    zero_stage: dict[str, int] = field(default_factory=dict)
    degrees: dict[str, str] = field(default_factory=dict)
    batch: int = 10
    is_own_loader: bool = False
    flags: tuple[str, ...] = ()
    world: int = 3
    passes: int = 6


ZERO = {
    "ZeRO 0, DP3 of 10": ZeroCase(0, (3, 2)),
    "ZeRO 2 to 3, DP3 of 10": ZeroCase(2, (3, 2, 3), {"2": 3}, flags=("--zero-init",)),
    "ZeRO 3, DP3 of 10, DeepSpeed's loader": ZeroCase(
        3, (3, 2, 3), is_own_loader=True, flags=("--zero-init",)
    ),
    "ZeRO 1, DP5 of 12": ZeroCase(1, (5, 2), degrees={"5": "dp5"}, batch=12, world=5, passes=15),
    "AutoTP, TP2·DP3 of 10": ZeroCase(
        1, (6, 2), degrees={"2": "tp1"}, world=6, passes=12, is_own_loader=True
    ),
}


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize("case", ZERO.values(), ids=ZERO)
def test_a_deepspeed_job_with_uneven_shares_learns_what_one_rank_does(
    case: ZeroCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {"zero_stage": {"default": case.stage, **case.zero_stage}}
    blocks = {"deepspeed": stages, "degrees": case.degrees}
    given = config(case.stage, batch=case.batch, micro=2, **blocks)
    loader = () if case.is_own_loader else ("--loader-workers", "0")
    alone = run_alone(tmp_path / "alone", given, *loader)
    if case.world == 6:
        given["train_batch_size"] *= 2  # DeepSpeed counts tensor-parallel ranks as replicas
        given["tensor_parallel"] = {"autotp_size": 2, "partition_config": AUTOTP_CUTS}
    folder, words = tmp_path / "elastic", (*loader, *case.flags)
    agents = train_through(folder, given, case.worlds, monkeypatch, *words)
    assert alone.wait(60) == 0
    check(agents, lines_of(tmp_path / "alone"), case.worlds)
    passes = {line["world"]: line["passes"] for line in agents.lines()}
    assert passes[case.world] == case.passes


@pytest.mark.campaign
@pytest.mark.turns
def test_a_pipeline_of_deepspeed_with_uneven_shares_learns_what_one_rank_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three replicas of one stage and of two share ten micro-batches or five."""
    degrees = {"default": "pp2", "6": "pp2", "3": "pp1", "2": "pp2"}
    given = config(1, batch=10, micro=2, degrees=degrees)
    del given["gradient_clipping"]  # a pipeline's norm in DeepSpeed depends on its stages
    alone = run_alone(tmp_path / "alone", given, "--num-stages", "1")
    worlds, folder = (6, 3, 2), tmp_path / "elastic"
    agents = train_through(folder, given, worlds, monkeypatch, "--num-stages", "2")
    assert alone.wait(60) == 0
    check(agents, lines_of(tmp_path / "alone"), worlds)
    after = [report["after"] for report in agents.resizes()]
    assert after == ["TP1·PP2·DP3", "TP1·PP1·DP3", "TP1·PP2·DP1"]
    functions = [report.get("function", "") for report in agents.resizes()[1:]]
    assert all(each.startswith("proven") for each in functions), functions


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.fault
def test_a_worker_is_killed_while_shares_are_uneven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three replicas lose one, and two have uneven shares, too: nothing is lost without ZeRO."""
    monkeypatch.setenv("DS_ACCELERATOR", ACCELERATOR)
    given, folder = config(0, batch=5, micro=1), tmp_path / "elastic"
    words = ("--loader-workers", "0")
    alone = run_alone(tmp_path / "alone", given, *words)
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(given))
    script, restarts = arguments(folder, "--step-s", "0.6", *words), ("--max-restarts", "3")
    with Agents(folder, None, script, nodes="1", slots=3, flags=restarts) as agents:
        agents.start("a")
        agents.wait_for_step(3, world=3)
        agents.kill_worker(2)
        agents.wait_until(lambda: len(agents.resizes()) == 2, "steps behind the failure")
        agents.scale(nproc=2)
        agents.wait_for_world(2)
        agents.wait_until(lambda: len(agents.resizes()) == 3, "the change is made")
        agents.wait_for_step(agents.lines()[-1]["step"] + 2)
        agents.kill_worker(1)
        agents.wait_until(lambda: len(agents.resizes()) == 4, "steps behind the second failure")
        (folder / "hurry").touch()
        assert agents.exit_code("a") == 0, agents.logs()
    assert alone.wait(60) == 0
    check(agents, lines_of(tmp_path / "alone"), (3, 2), changes=4)


SLOW_SCRIPT = Path(__file__).parents[1] / "support" / "slow_pretrain_gpt.py"
MEASURED = {"planner": "shares = 'measured'"}


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.skipif(
    megatron_lm_job.skip_reason() is not None, reason=str(megatron_lm_job.skip_reason())
)
@pytest.mark.parametrize(
    ("pp", "flags"),
    [(1, SHARDED), (1, "--calculate-per-token-loss"), (2, "--use-distributed-optimizer")],
    ids=["DP2, sharded", "DP2, by tokens", "PP2, DP2"],
)
def test_a_slower_replica_of_pretrain_gpt_has_a_smaller_share_from_the_next_change_on(
    pp: int, flags: str, tmp_path: Path, jobs: list[Job]
) -> None:
    """Each host has a rank. A change of the micro-batch is enough."""
    hosts, slow, steps_of = "abcd"[: 2 * pp], tmp_path / "slow", tmp_path / "ledger"
    slow.write_text("b")
    make_dataset(tmp_path / "text")
    script = [
        *MODEL.replace("--global-batch-size 12", "--global-batch-size 24").split(), *flags.split(),
        "--train-iters", "2000", "--data-path", str(tmp_path / "text"), "--split", "90,5,5",
        "--vocab-size", "256", "--data-cache-path", str(tmp_path / "cache"),
        "--eval-interval", "2000",
    ]  # fmt: skip
    environment = {
        "SCALAI_LEDGER_DIR": str(steps_of),
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ["PYTHONPATH"]]),
    }
    job = Agents(
        tmp_path, f"{2 * pp} = 'tp1 pp{pp}'",
        [str(SLOW_SCRIPT), str(Path(str(CHECKOUT), "pretrain_gpt.py")), str(slow), *script],
        slots=1, nodes=str(2 * pp), model="", settings=MEASURED, environment=environment,
    )  # fmt: skip

    def newest() -> int:
        return max(read_ledger(steps_of), default=0)

    def passes() -> Mapping[str, int]:
        """Return the passes of each host in a whole step behind those of now."""
        step = newest() + 1
        job.wait_until(lambda: newest() > step, f"step {step}", 400)
        return passes_of(slow, step)

    with job:
        for host in hosts:
            job.start(host)
        job.wait_until(lambda: "event=paces " in job.text(), "b is known to be slow", 400)
        said = job.text().partition("event=paces ")[2].partition(":")[0]
        slow_ones = {word.partition("=")[0] for word in said.split()}
        assert "b" in slow_ones and len(slow_ones) == pp, said  # with the host of its other stage
        assert passes() == dict.fromkeys(hosts, 12)
        job.scale(degrees=f"tp1 pp{pp} mbs2")
        job.wait_until(lambda: job.has_reported(2), "the change", 400)
        found = passes()
        assert 2 <= found["b"] < 6, found
        for host in hosts:
            assert found[host] == (found["b"] if host in slow_ones else 12 - found["b"]), found
        (report,) = job.resizes()[1:]
        assert str(report["function"]).startswith("proven"), report
        made = newest()
    alone = Job(
        tmp_path / "alone", pp, {pp: f"tp1 pp{pp}"}, [*script, "--exit-interval", str(made)]
    )
    jobs.append(alone)
    alone.finish()
    found_steps = {step: each for step, each in read_ledger(steps_of).items() if step <= made}
    assert list(found_steps) == list(range(1, made + 1))
    check_same_steps(found_steps, alone.ledger())


@pytest.mark.campaign
@pytest.mark.turns
def test_a_slower_replica_of_a_deepspeed_pipeline_has_a_smaller_share_from_the_next_change_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", ACCELERATOR)
    folder, flags = tmp_path / "elastic", ("--num-stages", "1", "--epochs", "100")
    given = config(1, batch=12, micro=1, **{"planner": {"shares": "measured"}})
    alone = run_alone(tmp_path / "alone", given, *flags)
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(given))
    (slow := folder / "slow").write_text("b")
    script = arguments(folder, *flags, "--slow", str(slow))
    with Agents(folder, None, script, nodes="2", slots=1) as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_until(lambda: "event=paces b=" in agents.text(), "b is known to be slow")
        step = agents.wait_for_world(2) - 1
        assert passes_of(slow, step) == {"a": 6, "b": 6}
        agents.scale(degrees="tp1 pp1 mbs2")
        agents.wait_until(lambda: agents.has_reported(2), "the change")
        agents.wait_for_step(step := agents.wait_for_world(2) + 2)
        assert passes_of(slow, step - 1) == {"a": 4, "b": 2}
        lines = agents.lines()
    assert alone.wait(60) == 0
    reference = lines_of(tmp_path / "alone")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    for line in lines:
        expected = reference[line["step"] - 1]
        assert line["lr"] == expected["lr"], line
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-6), line
