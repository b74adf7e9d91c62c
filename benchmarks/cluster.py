"""Policies for many elastic jobs on one cluster, on measured jobs: ``make bench NAME=cluster``.

Published workloads of eight hours on 16 hosts of 4 GPUs run in the simulator under the rules of the
published runs: a decision each minute, and 30 s of standstill at each change. ``peers.csv`` has the
completion times that Tiresias, Optimus and Pollux reached on them. Time here is virtual.

* ``tiresias_error``, ``optimus_error``: |our mean completion - the published one| / the published
  one, over the workloads of a load, by load: does the simulator follow the published rules?
* ``jct_vs_pollux_blind``, ``jct_vs_pollux_stated``: mean completion over Pollux's, by load, by
  ``goodput`` without a job's length, and by ``shortest`` with it. Both learn a job's speeds from
  its own steps; ``..._by_workload`` has each workload;
* ``jct_vs_fixed``: ``shortest`` over sizes and batches as asked for;
* ``jobs_vs_devices_alone``, ``jct_vs_devices_alone``: the dynamic program with devices and batch
  over the same with devices alone, at the least, a random and the most batch: jobs ended within the
  eight hours, and the others' mean completion over its own. 40 devices, 10 a job at most, a
  decision each 10 minutes; a sample counts the same at any batch;
* ``qssf_vs_fifo``: mean completion of first come first served over ``qssf``, on a month of jobs of
  Philly and as many devices as make 85 % of them busy; ``qssf_error``: median of |predicted -
  true seconds| / true; ``oracle_vs_fifo``: with true durations;
* ``energy_saved``: part of that month's host-hours switched off; ``energy_late``: part of the
  10-minute steps in which a host had to be awaited;
* ``decision_s``: seconds of a decision for 1,000 jobs on 10,000 devices;
* ``tenplex_goodput``: steps of a job through Tenplex's 538 minutes on 16, 8 and 4 devices, over
  those without pauses;
* ``jct_by_pause``: mean completion of ``shortest`` by the standstill of a change, of load 1.0.

``--all`` runs every policy at every load of the folder, with oracles, and prints a table.
``--data DIR`` takes traces and workloads from another folder of the form of ``cluster_data``.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np
from cluster_jobs import (
    DATA,
    HOUR,
    LIMITS,
    Peer,
    arrivals,
    read_kinds,
    read_month,
    read_peers,
    read_workloads,
    without_noise,
)
from report import Report, median_s

from scalai.core.cluster.application import Application
from scalai.core.cluster.history import PowerRule, QueuedJob, Served, hosts_on, serve
from scalai.core.cluster.placing import place_most_free, place_packed
from scalai.core.cluster.policies import POLICIES
from scalai.core.cluster.question import ClusterJob, Question, Standing
from scalai.core.cluster.simulator import Outcome, Rules, Sight, Submission, simulate
from scalai.core.degrees.degrees import Degrees
from scalai.core.planner.columns import Layout
from scalai.core.planner.trace import read_trace
from scalai.core.planner.trace_replay import Menu, Policy, Terms, account, by_table, replay

Workloads = Mapping[tuple[str, str], Sequence[Submission]]
TRACE = Path(__file__).parents[1] / "examples" / "traces" / "tenplex.csv"
TENPLEX_STEP_S = {16: 2.318, 8: 3.464, 4: 5.899}
"""Measured seconds of a step (examples/traces/tenplex_steps.csv)."""
PAUSE_S = 6.1
"""Measured pause of a change of 8.5 GB on one H100, without standby (docs/benchmarks.md)."""
PAUSES = (10.0, 1.0)
"""Standstills of a change beside that of the published runs."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy with what it sees. ``is_oracle``: more than a live one could."""

    name: str
    policy: str
    sight: Sight
    is_oracle: bool = False
    is_published: bool = False


TIRESIAS = Entry("tiresias", "tiresias", Sight("none", is_batch_free=False), is_published=True)
OPTIMUS = Entry(
    "optimus",
    "optimus",
    Sight("true", is_length_stated=True, is_batch_free=False, is_in_epochs=True),
    is_oracle=True,
    is_published=True,
)
FIXED = Entry("fixed", "fixed", Sight("none", is_batch_free=False))
BLIND = Entry("goodput", "goodput", Sight())
STATED = Entry("shortest", "shortest", Sight(is_length_stated=True))
OTHERS = (
    Entry("fifo", "fifo", Sight("none", is_batch_free=False)),
    Entry("qssf", "qssf", Sight("none", is_batch_free=False)),
    Entry("dynamic-program", "dynamic-program", Sight()),
    Entry("devices-alone", "dynamic-program", Sight(is_batch_free=False)),
    Entry("goodput, true speeds", "goodput", Sight("true"), is_oracle=True),
    Entry("shortest, true speeds", "shortest", Sight("true", True), is_oracle=True),
)


def run(
    entry: Entry,
    workload: Sequence[Submission],
    kinds: Mapping[str, Application],
    rules: Rules | None = None,
) -> Outcome:
    """Run a workload under a policy."""
    place = place_most_free if entry.is_published else place_packed
    return simulate(
        workload,
        kinds,
        POLICIES[entry.policy],
        rules or Rules(),
        entry.sight,
        limits=LIMITS,
        place=place,
    )


class Table:
    """Mean completion by load, workload and policy; each is run once."""

    def __init__(
        self, report: Report, workloads: Workloads, kinds: Mapping[str, Application]
    ) -> None:
        self._report, self._workloads, self._kinds = report, workloads, kinds
        self._found: dict[tuple[str, str, str], float] = {}

    @property
    def loads(self) -> list[str]:
        return sorted({load for load, _ in self._workloads})

    def numbers(self, load: str) -> list[str]:
        return sorted(number for of, number in self._workloads if of == load)

    def run(self, entry: Entry, load: str, number: str, rules: Rules | None = None) -> Outcome:
        return run(entry, self._workloads[load, number], self._kinds, rules)

    def mean(self, entry: Entry, load: str, number: str) -> float:
        key = entry.name, load, number
        if key not in self._found:
            outcome = self.run(entry, load, number)
            self._found[key] = outcome.mean_s
            self._report.say(f"{entry.name} at {load}, workload {number}: {outcome.mean_s:.0f} s")
        return self._found[key]

    def mean_of(self, entry: Entry, load: str) -> float:
        return fmean(self.mean(entry, load, number) for number in self.numbers(load))


def against(
    table: Table, entry: Entry, peers: Sequence[Peer], name: str
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return a policy's mean completion over a published one, by load, and by workload of it."""
    means: dict[str, float] = {}
    each: dict[str, list[float]] = {}
    for load in table.loads:
        pairs = [
            (table.mean(entry, load, peer.workload), peer.mean_s)
            for peer in sorted(peers, key=lambda peer: peer.workload)
            if (peer.load, peer.policy) == (load, name) and peer.workload in table.numbers(load)
        ]
        if pairs:
            each[load] = [digits(ours / theirs) for ours, theirs in pairs]
            means[load] = digits(sum(o for o, _ in pairs) / sum(t for _, t in pairs))
    return means, each


def digits(value: float) -> float:
    return float(f"{value:.4g}")


def add_published(report: Report, table: Table, peers: Sequence[Peer]) -> None:
    """Add the figures against the published runs."""
    for entry in (TIRESIAS, OPTIMUS):
        means, each = against(table, entry, peers, entry.name)
        errors = {load: digits(abs(mean - 1)) for load, mean in means.items()}
        report.add(f"{entry.name}_error", errors)
        report.add(f"{entry.name}_by_workload", each)
    for entry, name in ((BLIND, "blind"), (STATED, "stated")):
        means, each = against(table, entry, peers, "pollux")
        report.add(f"jct_vs_pollux_{name}", means)
        report.add(f"jct_vs_pollux_{name}_by_workload", each)
    ratios = {
        load: digits(table.mean_of(STATED, load) / table.mean_of(FIXED, load))
        for load in table.loads
    }
    report.add("jct_vs_fixed", ratios)


def add_devices_alone(report: Report, kinds: Mapping[str, Application]) -> None:
    """Add the dynamic program against itself without batches."""
    few = {name: without_noise(kinds[name]) for name in sorted(kinds) if name != "imagenet"}
    limits = {
        name: replace(kind.limits, devices=(1, min(10, kind.limits.devices[1])))
        for name, kind in few.items()
    }
    rules = Rules(hosts=10, per_host=4, every_s=600)
    jobs: dict[str, dict[str, float]] = {}
    times: dict[str, dict[str, float]] = {}
    for rate, name in ((8.0, "low"), (24.0, "high")):
        for batch in ("least", "random", "most"):
            done, means = [], []
            for is_free in (True, False):
                workload = arrivals(rate, 8, few, batch, seed=1)
                sight = Sight("true", is_batch_free=is_free)
                policy = POLICIES["dynamic-program"]
                found = simulate(
                    workload, few, policy, rules, sight, limits=limits, place=place_packed
                )
                at = {one.name: one.at_s for one in workload}
                ends = [at[job] + took for job, took in found.completion_s.items()]
                done.append(sum(end <= 8 * HOUR for end in ends))
                means.append(found.mean_s)
            jobs.setdefault(name, {})[batch] = digits(done[0] / max(done[1], 1))
            times.setdefault(name, {})[batch] = digits(means[1] / means[0])
    report.add("jobs_vs_devices_alone", jobs)
    report.add("jct_vs_devices_alone", times)


def add_month(report: Report, month: Sequence[QueuedJob]) -> None:
    """Add the queue and the energy of a month."""
    span = month[-1].at_s - month[0].at_s
    busy = sum(job.devices * job.seconds for job in month) / span
    hosts = math.ceil(busy / 0.85 / 8)
    report.add("month", {"jobs": len(month), "hosts_of_8": hosts})
    fifo = serve(month, hosts * 8, by_service=False)
    qssf = serve(month, hosts * 8, by_service=True)
    known = [
        (said, job.seconds)
        for said, job in zip(qssf.predicted_s, month, strict=True)
        if said is not None and job.seconds > 0
    ]
    mean = fifo.mean_completion_s(month)
    report.add("qssf_vs_fifo", mean / qssf.mean_completion_s(month))
    report.add("qssf_error", median(abs(said / true - 1) for said, true in known))
    report.add("oracle_vs_fifo", mean / _known(month, hosts * 8).mean_completion_s(month))
    saved, late = energy(qssf, hosts, span)
    report.add("energy_saved", saved)
    report.add("energy_late", late)


def _known(month: Sequence[QueuedJob], devices: int) -> Served:
    return serve(month, devices, by_service=True, is_known=True)


def energy(served: Served, hosts: int, span: float) -> tuple[float, float]:
    """Return the part of host-hours that are off, and of steps that lack a host."""
    steps = int(span // 600)
    demand = [0] * steps
    at, now = 0, 0
    for step in range(steps):
        most = now
        while at < len(served.busy) and served.busy[at][0] < (step + 1) * 600:
            now = served.busy[at][1]
            most = max(most, now)
            at += 1
        demand[step] = math.ceil(most / 8)
    rule = PowerRule(spare=max(2, hosts // 20))
    on, rested, total, late = hosts, 0, 0, 0
    for step in range(1, steps):
        late += demand[step] > on
        total += on
        wanted = min(hosts, hosts_on(demand[: step + 1], on, rested, rule))
        rested = 0 if wanted != on else rested + 1
        on = wanted
    return 1 - total / (hosts * (steps - 1)), late / (steps - 1)


def big_question(jobs: int = 1000, devices: int = 10_000) -> Question:
    """Return a question of many jobs with different speeds, half of them running."""
    random = np.random.default_rng(7)
    found = []
    sizes = np.arange(0, 65, dtype=np.float64)
    for number in range(jobs):
        drag = random.uniform(0.005, 0.2)
        rates = sizes / (1 + drag * np.maximum(sizes - 1, 0))
        standing = Standing(8, 3600.0, 8 * 3600.0) if number % 2 else Standing()
        work = float(random.lognormal(9, 2))
        found.append(
            ClusterJob(
                f"job-{number}", "kind", float(number), 8, (1, 64), standing, rates,
                remaining=work, pause_s=30.0,
            )
        )  # fmt: skip
    return Question(1e4, tuple(found), devices // 8, 8)


def tenplex_goodput(pause_s: float) -> float:
    """Return the goodput of a job through Tenplex's trace, by measured steps and a pause."""
    table = {
        16: Layout(Degrees(2, 4, 2), 8), 8: Layout(Degrees(2, 4, 1), 8),
        4: Layout(Degrees(2, 2, 1), 8),
    }  # fmt: skip
    menu = Menu({layout: TENPLEX_STEP_S[size] for size, layout in table.items()})
    trace = read_trace(TRACE.read_text().splitlines(), TRACE.name)
    policy = Policy("table", by_table(table), lambda before, after: pause_s, kept_every_s=0.0)
    return account(replay(trace, policy, table[16], Terms()), menu).goodput


def add_pauses(report: Report, table: Table) -> None:
    """Add the worth of cheap changes."""
    load = table.loads[0]
    found = {f"{Rules().pause_s:g}": digits(table.mean_of(STATED, load))}
    for pause in PAUSES:
        means = [table.run(STATED, load, number, Rules(pause_s=pause)).mean_s
                 for number in table.numbers(load)]  # fmt: skip
        found[f"{pause:g}"] = digits(fmean(means))
    report.add("jct_by_pause", found, "s")


def print_table(table: Table) -> None:
    """Print every policy's mean completion, as a table of Markdown."""
    entries = (FIXED, TIRESIAS, OPTIMUS, BLIND, STATED, *OTHERS)
    print("| policy | " + " | ".join(table.loads) + " |")
    print("|---" * (len(table.loads) + 1) + "|")
    for entry in entries:
        cells = [f"{table.mean_of(entry, load):.0f}" for load in table.loads]
        print(f"| {entry.name}{' (oracle)' * entry.is_oracle} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="traces and workloads")
    parser.add_argument("--all", action="store_true", help="every policy at every load")
    options = parser.parse_args()
    report = Report("cluster")
    kinds, workloads = read_kinds(options.data), read_workloads(options.data)
    table = Table(report, workloads, kinds)
    add_published(report, table, read_peers(options.data))
    add_devices_alone(report, kinds)
    month = read_month(options.data) or read_month(DATA)
    add_month(report, month)
    question = big_question()
    report.add("decision_s", median_s(partial(POLICIES["shortest"], question, {})), "s")
    report.add("tenplex_goodput", tenplex_goodput(PAUSE_S))
    add_pauses(report, table)
    if options.all:
        print_table(table)
    report.finish()


if __name__ == "__main__":
    main()
