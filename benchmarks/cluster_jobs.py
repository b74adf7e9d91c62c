"""Workloads and measured kinds of jobs, read from a folder (``cluster_data/README.md``)."""

from csv import DictReader
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from scalai.core.cluster.application import Application, Asked, Epoch, Limits, read_application
from scalai.core.cluster.history import QueuedJob
from scalai.core.cluster.simulator import Submission

DATA = Path(__file__).parent / "cluster_data"
EPOCHS = {
    "bert": 2, "cifar10": 100, "deepspeech2": 80, "imagenet": 90, "ncf": 10, "yolov3": 50,
}  # fmt: skip
LOCAL = {"yolov3": (4, 8)}
LIMITS = {"ncf": Limits((1, 1), (32768, 32768), (32, 32768))}
"""Stated limits of the published runs."""
HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A published mean completion time."""

    load: str
    workload: str
    policy: str
    mean_s: float


def read_kinds(folder: Path) -> dict[str, Application]:
    """Return the measured kinds of jobs by name."""
    found = {}
    for name, epochs in EPOCHS.items():
        at = folder / "traces" / name
        tables = {
            int(path.stem.split("-")[1]): _lines(path) for path in at.glob("validation-*.csv")
        }
        placed, scaled = _lines(at / "placements.csv"), _lines(at / "scalability.csv")
        found[name] = read_application(
            name, placed, scaled, tables, epochs=epochs, local=LOCAL.get(name)
        )
    return found


def read_workloads(folder: Path) -> dict[tuple[str, str], list[Submission]]:
    """Return workloads by load and number."""
    found = {}
    for path in sorted((folder / "workloads").glob("load-*-*.csv")):
        _, load, number = path.stem.split("-")
        found[load, number] = [
            Submission(
                row["name"],
                float(row["time"]),
                row["application"],
                Asked(int(row["num_replicas"]), int(row["batch_size"])),
            )
            for row in DictReader(_lines(path))
        ]
    return found


def read_peers(folder: Path) -> list[Peer]:
    """Return the published means; none where the folder has no such file."""
    path = folder / "peers.csv"
    if not path.exists():
        return []
    return [
        Peer(row["load"], row["workload"], row["policy"], float(row["mean_jct_s"]))
        for row in DictReader(_lines(path))
    ]


def read_month(folder: Path) -> list[QueuedJob]:
    """Return a month of a cluster's jobs, in order of submission."""
    path = next(folder.glob("philly-*.csv"), None)
    if path is None:
        return []
    return [
        QueuedJob(
            float(row["at_s"]),
            int(row["devices"]),
            float(row["seconds"]),
            row["cluster"],
            row["cluster"],
        )
        for row in DictReader(_lines(path))
    ]


def without_noise(kind: Application) -> Application:
    """Return a kind whose accuracy no batch affects: a sample counts the same at any batch."""
    epochs = {
        batch: tuple(Epoch(one.steps, 0.0, 1.0) for one in rows)
        for batch, rows in kind.epochs.items()
    }
    return replace(kind, epochs=epochs, _steps={}, _noise={})


def arrivals(
    per_hour: float, hours: float, kinds: dict[str, Application], batch: str, seed: int
) -> list[Submission]:
    """Return jobs that arrive at random over some hours.

    Args:
        batch: ``least``, ``random`` or ``most`` of the validated batches.
    """
    random = Random(seed)
    found, at = list[Submission](), random.expovariate(per_hour / HOUR)
    while at < hours * HOUR:
        name = random.choice(sorted(kinds))
        sizes = sorted(kinds[name].epochs)
        drawn = random.choice(sizes)
        size = {"least": sizes[0], "most": sizes[-1], "random": drawn}[batch]
        found.append(Submission(f"{name}-{len(found)}", at, name, Asked(4, size)))
        at += random.expovariate(per_hour / HOUR)
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
