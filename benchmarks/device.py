"""How fast the state of a CUDA device goes out and in: ``python benchmarks/device.py``.

One process, a state of 4 GB in tensors as a model has them. Beside every copy stands what the
device's link allows: copies of the same size to and from pinned memory, in the same run. Snapshots
are also made beside a training, whose steps are timed without them and with one in each step.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import Report, median_s
from warm_copies import MEMORY_DISK

from scalai.core.messages.worker_messages import RankSnapshot
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.plan import plan
from scalai.core.tensors.region import Piece, row_major, whole
from scalai.runtime.emergency_writer import VolatileCopies
from scalai.runtime.live import Slot, collection_of, held_rows, wanted_rows
from scalai.runtime.live_files import (
    MappedFile,
    map_sources,
    ordered_fingerprints,
    place_rows,
    read_rows,
)
from scalai.runtime.live_fingerprints import live_fingerprints
from scalai.runtime.staging import rings_for
from scalai.store.host import HostStore
from scalai.store.moves import holders_of, read_orders

COLUMNS = 8192
RAW_BYTES = 256 << 20
STEPS = 10


def model(size_bytes: int, device: str) -> list[Slot]:
    """Return slots of matrices [rows, COLUMNS] of float32, as many as fill the size."""
    rows = 2048
    shape = (rows, COLUMNS)
    return [
        Slot(
            Tensor(f"param/{number}", shape, "F32"),
            torch.randn(rows * COLUMNS, device=device),
            (Piece(whole(shape), 0, row_major(shape)),),
        )
        for number in range(size_bytes // (4 * rows * COLUMNS))
    ]


def raw_seconds(size_bytes: int, *, out: bool) -> float:
    """Return the seconds that plain copies between the device and pinned memory take."""
    pinned = torch.empty(RAW_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(RAW_BYTES, dtype=torch.uint8, device="cuda")
    source, target = (on_device, pinned) if out else (pinned, on_device)

    def copy() -> None:
        for _ in range(size_bytes // RAW_BYTES):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    return median_s(copy)


def step_seconds(beside: Callable[[], threading.Thread | None]) -> float:
    """Return the seconds of a step that keeps the device busy; ``beside`` begins what runs beside
    it, and an update would wait for it."""
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        thread = beside()
        out = left
        for _ in range(200):
            out = left @ out
        torch.cuda.synchronize()
        if thread is not None:
            thread.join()

    step()
    return median_s(step, STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of state (default: 4)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    report = Report("device")
    slots = model(int(options.gigabytes * 1e9), "cuda")
    rows = held_rows(slots)
    size_bytes = sum(slot.buffer.nbytes for slot in slots)
    report.add("device", torch.cuda.get_device_name())
    report.add("state_gb", size_bytes / 1e9, "GB")
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder:
        measure(report, slots, rows, size_bytes, HostStore("job", "a", Path(folder)))
    report.finish()


def measure(
    report: Report,
    slots: list[Slot],
    rows: list[tuple[Slot, Piece]],
    size_bytes: int,
    store: HostStore,
) -> None:
    """Add the figures of a state of ``size_bytes``."""
    gb = size_bytes / 1e9
    rings = rings_for({slots[0].buffer.device})
    placed = store.reserve({0: collection_of(rows)})
    order = placed.orders[0]
    mapped = MappedFile(order)
    place_rows(rows, order, rings, mapped)
    out_s, in_s = raw_seconds(size_bytes, out=True), raw_seconds(size_bytes, out=False)
    report.add("raw_out_gbps", gb / out_s, "GB/s")
    report.add("raw_in_gbps", gb / in_s, "GB/s")
    snapshot_s = median_s(lambda: place_rows(rows, order, rings, mapped))
    report.add("snapshot_gbps", gb / snapshot_s, "GB/s into mapped memory")
    report.add("snapshot_ratio", snapshot_s / out_s, "x the time of plain copies")
    proof_s = median_s(lambda: live_fingerprints(rows))
    report.add("fingerprint_gbps", gb / proof_s, "GB/s on the device")
    prints = ordered_fingerprints(rows, order, {})
    store.seal(placed, step=1, about={}, parts={0: RankSnapshot(prints, "dp0")})
    manifest = store.commit(placed, 1)
    target = Holder(store.host, collection_of(rows), 0)
    planned = plan(holders_of([manifest]), [target])
    directories = {store.host: store.generation_directory(1)}
    reading = read_orders(planned, [manifest], directories)[0]
    wanted = wanted_rows(slots)
    sources = map_sources(wanted, reading)
    restore_s = median_s(lambda: read_rows(wanted, reading, rings, sources))
    report.add("restore_gbps", gb / restore_s, "GB/s from mapped memory")
    report.add("restore_ratio", restore_s / in_s, "x the time of plain copies")

    placed = store.reserve({0: collection_of(rows)})
    order = placed.orders[0]
    mapped, copies = MappedFile(order), VolatileCopies(rows)

    def beside() -> threading.Thread:
        copies.take()

        def write() -> None:
            with copies.beside(rings):
                place_rows(copies.rows, order, rings, mapped)

        thread = threading.Thread(target=write)
        thread.start()
        return thread

    alone_s = step_seconds(lambda: None)
    report.add("step_s", alone_s, "s")
    report.add("step_ratio", step_seconds(beside) / alone_s, "x with a snapshot in each step")
    began = time.perf_counter()
    copies.take()
    report.add("take_s", time.perf_counter() - began, "s that a step stands still for a snapshot")


if __name__ == "__main__":
    main()
