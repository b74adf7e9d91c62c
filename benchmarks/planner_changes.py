"""What changes of a GPT-3 175B move with hosts placed and not, and how published times of
reconfigurations compare with the model's."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from report import Report

from scalai.core.degrees.degrees import Degrees
from scalai.core.planner.change import fill, in_order
from scalai.core.planner.columns import NO_SHARDING, Layout, Workload
from scalai.core.planner.devices import GB, device_named
from scalai.core.planner.overlaps import overlaps_of
from scalai.core.planner.placement import place_by
from scalai.core.planner.reconfiguration import Hosts, Rates, reconfiguration, spread
from scalai.core.planner.shape import ModelShape
from scalai.launch.config.script_facts import read_table_shape

PER_HOST = 8
CHANGES = (
    ((8, 16, 8), (8, 16, 6)), ((8, 16, 8), (8, 16, 4)), ((8, 16, 8), (8, 12, 8)),
    ((8, 16, 8), (8, 8, 8)), ((8, 16, 8), (4, 16, 12)), ((8, 16, 8), (8, 16, 12)),
    ((8, 16, 6), (8, 16, 8)), ((8, 12, 8), (8, 16, 8)), ((8, 8, 8), (8, 16, 8)),
    ((4, 16, 12), (8, 16, 8)),
)  # fmt: skip
"""TP, PP, DP before and after, of hosts of 8. Hosts that leave were spread evenly over the job."""
TENPLEX_MODELS = {
    "gpt-large": (24, 1536, 16), "gpt-xl": (24, 2064, 24), "gpt-2.7B": (32, 2560, 32),
    "gpt-6.7B": (32, 4096, 32),
}  # fmt: skip
"""Layers, width and heads (Tenplex, SOSP 2024, artifact)."""
TENPLEX_PER_HOST = 4


def gpt(layers: int, hidden: int, heads: int, seq: int) -> ModelShape:
    """The shape of a GPT with a vocabulary of 51,200."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "seq": seq, "positions": seq}
    return read_table_shape({**sizes, "vocab": 51_200}, "the benchmark")


def placement(report: Report) -> None:
    """Add how many bytes cross between hosts, against the order of joining."""
    work, totals = Workload(gpt(96, 12_288, 96, 2_048), 1_536), [0, 0]
    for first, second in CHANGES:
        before, after = (Layout(Degrees(*each), 1) for each in (first, second))
        old = spread(before.degrees.world_size, PER_HOST)
        placed = place_by(overlaps_of(work, before, after), old, _there(old, after.degrees))
        totals[0] += placed.moves
        totals[1] += placed.unplaced_moves
        report.say(
            f"{before.degrees} to {after.degrees}: {placed.moves / GB:.0f} GB cross, "
            f"{placed.unplaced_moves / GB:.0f} GB in the order of joining"
        )
        if placed.moves > placed.least_moves:
            report.say(f"  greedily: no order has less than {placed.least_moves / GB:.0f} GB")
    report.add("placement_ratio", totals[0] / totals[1])


def _there(old: Hosts, after: Degrees) -> Hosts:
    """Return the hosts after a change, in the order of joining."""
    count = -(-after.world_size // PER_HOST)
    kept = [old[place * len(old) // count][0] for place in range(count)] if count < len(old) else []
    names = kept or [name for name, _ in old]
    hosts = spread(after.world_size, PER_HOST, names)
    return fill(in_order(old, hosts), after.world_size, after.tp)


@dataclass(frozen=True, slots=True)
class _Published:
    """One published time, with what our plan would move for the same change."""

    name: str
    kind: str
    seconds: float
    moved: float
    """Bytes that the busiest host gives or takes."""
    written: float
    """Bytes of its ranks."""


def published(report: Report, path: Path) -> None:
    """Compare the seconds of published reconfigurations with those of the model.

    What a host's software takes for a byte is no figure of a device: three constants a cluster
    (seconds, and bytes/s of what crosses and of what is written) are fitted, and each row is also
    predicted by what the others of its cluster say.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kinds: dict[str, list[_Published]] = {}
    unmodelled = 0
    for row in rows:
        one = _row(row)
        if one is None:
            unmodelled += 1
            named = " ".join(row[name] for name in ("figure", "model", "system", "change"))
            report.say(f"not modelled: {named}, {row['time_s']} s")
        else:
            kinds.setdefault(one.kind, []).append(one)
    held_out: list[float] = []
    fitted: list[float] = []
    for kind, cases in kinds.items():
        constants = _fit(cases)
        report.say(f"{kind}: {constants[0]:.1f} s, {_rate(constants[1])} crossing, "
                   f"{_rate(constants[2])} written")  # fmt: skip
        for case in cases:
            said = _seconds(case, constants)
            left_out = _seconds(case, _fit([other for other in cases if other is not case]))
            fitted.append(abs(said / case.seconds - 1))
            held_out.append(abs(left_out / case.seconds - 1))
            report.say(f"  {case.name}: {case.seconds:.1f} s published, {said:.1f} s, "
                       f"{left_out:.1f} s left out")  # fmt: skip
    report.add("published_rows", len(fitted))
    report.add("published_not_modelled", unmodelled)
    report.add("published_error_mean", fmean(fitted))
    report.add("published_error_max", max(fitted))
    report.add("published_held_out_error_mean", fmean(held_out))


def _row(row: dict[str, str]) -> _Published | None:
    """Return a row that the model speaks of: state is moved, in degrees that are stated."""
    is_counted = (
        row["system"].startswith("tenplex") and row["tp_from"] and float(row["time_s"]) < 300
    )
    if not is_counted:
        return None
    layers, hidden, heads = TENPLEX_MODELS[row["model"]]
    ends = [
        tuple(int(row[f"{axis}_{end}"]) for axis in ("tp", "pp", "dp")) for end in ("from", "to")
    ]
    # All degrees are of fp16 with whole replicas; vocabulary of GPT-2, padded.
    before, after = (Layout(Degrees(*each), 1, sharding=NO_SHARDING) for each in ends)
    work = Workload(_shape(layers, hidden, heads), 128, "fp16")
    old = spread(before.degrees.world_size, TENPLEX_PER_HOST)
    names = [] if row["change"] == "redeploy" else [name for name, _ in old]
    new = spread(after.degrees.world_size, TENPLEX_PER_HOST, names)
    if row["change"] == "redeploy":
        new = tuple((f"new-{name}", count) for name, count in new)
    lost = frozenset[str]()
    if row["change"].startswith("failure"):
        gone = int(row["change"].removeprefix("failure")) // TENPLEX_PER_HOST
        lost = frozenset(name for name, _ in old[len(old) - gone :])
    rates = Rates(host_copy=1.0, data_plane=1.0)
    cost = reconfiguration(
        work, device_named("a100"), before, after, old, new, lost=lost, relaunch_s=0.0, rates=rates
    )
    moved, written = cost.seconds["move"], cost.seconds["restore"] * TENPLEX_PER_HOST
    if row["system"] == "tenplex-central":
        # All pieces go to one host first, and from there to every host.
        wanted = cost.needed / len(new)
        moved = wanted * (len(new) - 1) + cost.needed * (len(old) - 1) / len(new) / len(old)
    cluster = "cloud" if row["figure"] == "fig15" else "on premise"
    kind = f"{row['system']}, {cluster}"
    name = f"{row['figure']} {row['model']} {row['change']} {before.degrees} to {after.degrees}"
    return _Published(name, kind, float(row["time_s"]), moved, written)


def _shape(layers: int, hidden: int, heads: int) -> ModelShape:
    return gpt(layers, hidden, heads, 1_024)


def _fit(cases: Sequence[_Published]) -> tuple[float, float, float]:
    """Return seconds, seconds a byte crossing, seconds a byte written: least squares of relative
    errors, none below 0."""
    table = np.array([[1.0, case.moved, case.written] for case in cases])
    target = np.array([case.seconds for case in cases])
    scaled = table / target[:, None]
    best, least = np.zeros(3), np.inf
    for used in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        found = np.zeros(3)
        scale = np.abs(scaled[:, used]).max(axis=0)
        scale[scale == 0] = 1.0
        part, *_ = np.linalg.lstsq(scaled[:, used] / scale, np.ones(len(cases)), rcond=None)
        found[used] = part / scale
        loss = float(((scaled @ found - 1) ** 2).sum())
        if (found >= 0).all() and loss < least:
            best, least = found, loss
    return float(best[0]), float(best[1]), float(best[2])


def _seconds(case: _Published, constants: tuple[float, float, float]) -> float:
    return constants[0] + constants[1] * case.moved + constants[2] * case.written


def _rate(seconds_per_byte: float) -> str:
    return f"{1 / seconds_per_byte / GB:.2f} GB/s" if seconds_per_byte else "nothing for bytes"
