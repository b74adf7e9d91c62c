"""Throughput of the devices that are left, by the planner's model: ``make bench NAME=utilisation``.

Four jobs on H100 hosts of 8, sequence 4,096, each on every number of hosts from a third to all. A
row's figure is the throughput of a present device over that of the full job; an idle device counts
as present. Rows whose memory needs more recomputation than the full job's have a bound of their
own: the full job with that recomputation, the most that a device can do which recomputes so.

* ``mean``, ``least``: of the other rows; ``even_mean``, ``even_least``: the same where DP divides
  the batch, PP the layers, and the rest is idle;
* ``of_bound_mean``, ``of_bound_least``: of rows with more recomputation, over their bound;
* ``rows_without_layout``: numbers of hosts on which nothing fits.

``--picture FILE`` draws both (.svg or .png); ``--hosts`` and ``--batch`` with ``--layers --hidden
--heads --kv-heads --ffn --vocab`` ask for another shape instead.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from report import Report

from scalai.core.degrees.passes import RECOMPUTES, Recompute
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import Workload
from scalai.core.planner.devices import device_named
from scalai.core.planner.score import limits_of
from scalai.core.planner.search import Choices, Estimate, search
from scalai.core.planner.shape import ModelShape

PER_HOST, SEQUENCE = 8, 4_096
DEVICE = device_named("h100")


@dataclass(frozen=True, slots=True)
class Job:
    """A Llama-like model, its global batch and its hosts."""

    name: str
    shape: ModelShape
    batch: int
    hosts: int


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, ffn=ffn, vocab=vocab, seq=SEQUENCE,
        kv_groups=kv_heads, head_dim=hidden // heads, is_gated=True, positions=0, is_tied=False,
        has_bias=False, has_norm_bias=False,
    )  # fmt: skip


JOBS = (
    Job("8B", llama(32, 4_096, 32, 8, 14_336, 128_256), 512, 8),
    Job("30B", llama(60, 6_656, 52, 52, 17_920, 32_000), 512, 8),
    Job("70B", llama(80, 8_192, 64, 8, 28_672, 128_256), 512, 8),
    Job("70B, 64 hosts", llama(80, 8_192, 64, 8, 28_672, 128_256), 1_024, 64),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One number of hosts: figures of the best layout, and of the best with even shares."""

    hosts: int
    ratio: float
    even: float
    bound: float | None
    """The same ratio of the full job with this row's recomputation; None: it is the full job's."""
    layout: str
    """Empty: nothing fits."""


def best(
    job: Job, hosts: int, *, is_even: bool, recompute: Recompute | None = None
) -> Estimate | None:
    """Return the best layout; None: none fits."""
    work = Workload(job.shape, job.batch, has_dropout=False)
    limits = replace(limits_of(work), has_uneven_shares=not is_even, has_uneven_stages=not is_even)
    choices = Choices() if recompute is None else Choices(recompute=(recompute,))
    try:
        return search(work, DEVICE, hosts * PER_HOST, limits, choices).best
    except RefusedError:
        return None


def rows_of(job: Job) -> list[Row]:
    """Return the rows of a job, the full one first."""
    full = best(job, job.hosts, is_even=True)
    assert full is not None, "the full job fits"
    by_recompute = {kind: best(job, job.hosts, is_even=True, recompute=kind) for kind in RECOMPUTES}

    def ratio(found: Estimate | None, hosts: int) -> float:
        return 0.0 if found is None else full.seconds * job.hosts / (found.seconds * hosts)

    rows = []
    for hosts in range(job.hosts, -(-job.hosts // 3) - 1, -1):
        found = best(job, hosts, is_even=False)
        if found is None:
            rows.append(Row(hosts, 0.0, 0.0, None, ""))
            continue
        kind = found.layout.recompute
        is_more = RECOMPUTES.index(kind) > RECOMPUTES.index(full.layout.recompute)
        rows.append(
            Row(
                hosts, ratio(found, hosts), ratio(best(job, hosts, is_even=True), hosts),
                ratio(by_recompute[kind], job.hosts) if is_more else None, str(found.layout),
            )
        )  # fmt: skip
    return rows


def add(report: Report, rows: Sequence[Row]) -> None:
    """Add the figures over all rows."""
    free = [row for row in rows if row.bound is None and row.layout]
    forced = [(row, row.bound) for row in rows if row.bound is not None]
    report.add("rows", len(free))
    report.add("mean", fmean(row.ratio for row in free))
    report.add("least", min(row.ratio for row in free))
    report.add("even_mean", fmean(row.even for row in free))
    report.add("even_least", min(row.even for row in free))
    report.add("rows_without_layout", sum(not row.layout for row in rows))
    report.add("rows_with_more_recomputation", len(forced))
    if forced:
        report.add("of_bound_mean", fmean(row.ratio / bound for row, bound in forced))
        report.add("of_bound_least", min(row.ratio / bound for row, bound in forced))


def draw(path: Path, jobs: Sequence[tuple[Job, Sequence[Row]]]) -> None:
    """Draw throughput a present device by hosts, even against uneven, a panel a job."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(jobs), figsize=(3 * len(jobs), 2.6), sharey=True, squeeze=False
    )
    for panel, (job, rows) in zip(panels[0], jobs, strict=True):
        found = [row for row in rows if row.layout]
        hosts = [row.hosts for row in found]
        panel.plot(hosts, [row.even for row in found], ".--", color="0.55", label="even")
        panel.plot(hosts, [row.ratio for row in found], ".-", color="C0", label="uneven")
        bounds = [(row.hosts, row.bound) for row in found if row.bound is not None]
        if bounds:
            panel.plot(*zip(*bounds, strict=True), "_", color="C3", label="bound")
        panel.set(title=f"{job.name}, batch {job.batch}", xlabel="hosts of 8", ylim=(0, 1.1))
        panel.title.set_fontsize(10)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("throughput a present device")
    panels[0][0].legend(loc="lower right", frameon=False)
    figure.tight_layout()
    # The same figures make the same file; letters are text.
    pyplot.rcParams |= {"svg.hashsalt": "utilisation", "svg.fonttype": "none"}
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, help="file to draw to")
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--batch", type=int, default=512)
    for name, size in (("layers", 32), ("hidden", 4_096), ("heads", 32), ("kv-heads", 8),
                       ("ffn", 14_336), ("vocab", 128_256)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=size)
    given = parser.parse_args()
    jobs: tuple[Job, ...] = JOBS
    if given.hosts is not None:
        shape = llama(
            given.layers, given.hidden, given.heads, given.kv_heads, given.ffn, given.vocab
        )
        jobs = (Job("the given job", shape, given.batch, given.hosts),)
    report, found = Report("utilisation"), []
    for job in jobs:
        rows = rows_of(job)
        found.append((job, rows))
        report.say(f"{job.name}, batch {job.batch}: hosts, uneven, even, bound, layout")
        for row in rows:
            bound = "" if row.bound is None else f"{row.bound:.3f}"
            layout = row.layout or "nothing fits"
            report.say(f"{row.hosts:3} {row.ratio:.3f} {row.even:.3f} {bound:5} {layout}")
    add(report, [row for _, rows in found for row in rows])
    if given.picture is not None:
        draw(given.picture, found)
    report.finish()


if __name__ == "__main__":
    main()
