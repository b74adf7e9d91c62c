"""The virtual file system against the raw file: ``mount_ratio``, ``mount_cold_ratio``,
``reader_ratio``, ``repartition_s``; with what ``dataset_order.py`` measures of order and ledger.

Ratios are the seconds of the raw file over those of ours, so that 1 is as fast and less is slower:
the smaller one of a sequential and a random pass of reads of 8 KB. *Cold*: the kernel's caches of
both sides are dropped before each pass (needs root). A figure is the median of ``RUNS`` runs, of
which each has both sides behind each other.
"""

import argparse
import importlib
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dataset_order
import numpy as np
from report import Report, timed

from scalai.vfs.token_index import index_content

READ_BYTES = 8192
RANDOM_READS = 50_000
COLD_RANDOM_READS = 5_000
RUNS = 3
SAMPLES = 10**9
GLOBAL_BATCH = 5040
DPS = [dp for dp in range(2, GLOBAL_BATCH) if GLOBAL_BATCH % dp == 0][:20]
"""Degrees at which each global batch has whole shares."""
SAMPLE_TOKENS = 4
SCALAI = Path(sys.executable).with_name("scalai")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.3, help="of the file that is read")
    parser.add_argument("--folder", type=Path, help="where it is written, a disk with room")
    args = parser.parse_args()
    report = Report("dataset")
    with tempfile.TemporaryDirectory(prefix="scalai-dataset-", dir=args.folder) as name:
        folder = Path(name)
        report.add("file_gb", write_file(folder / "c", int(args.gigabytes * 1e9)) / 1e9)
        write_sparse(folder / "many")
        point = folder / "point"
        point.mkdir()
        (folder / "elastic.toml").write_text(
            f'[dataset]\nsources = {{ c = "{folder}/c", many = "{folder}/many" }}\n'
            f"record_tokens = {{ c = 4096, many = {SAMPLE_TOKENS} }}\n"
            f"global_batch_size = {GLOBAL_BATCH}\n"
        )
        elastic, log = f"--elastic={folder / 'elastic.toml'}", f"--log={folder / 'log'}"
        scalai("mount", "bench", point, elastic, log)
        try:
            measure_mount(report, folder / "c.bin", point / "dataset" / "c" / "source" / "c.bin")
            measure_reader(report, folder)
            measure_repartition(report, point / "dataset" / "many")
        finally:
            scalai("unmount", "--lazy", point)
    measure_order(report)
    report.finish()


def scalai(*arguments: object) -> None:
    subprocess.run([SCALAI, *map(str, arguments)], check=True, timeout=120, stdout=sys.stderr)


def write_file(prefix: Path, size: int) -> int:
    """Write tokens that no disk compresses, and their index; return how many bytes."""
    block = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
    count = size // READ_BYTES
    with open(f"{prefix}.bin", "wb") as file:
        for begin in range(0, count * READ_BYTES, len(block)):
            file.write(np.roll(block, begin // len(block))[: count * READ_BYTES - begin].data)
        os.fsync(file.fileno())
    write_index(prefix, count, READ_BYTES // 2)
    return count * READ_BYTES


def write_sparse(prefix: Path) -> None:
    """Make ``SAMPLES`` samples that take no room on the disk, and the index of one of them."""
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(SAMPLES * SAMPLE_TOKENS * 2)
    write_index(prefix, 1, SAMPLE_TOKENS)


def write_index(prefix: Path, count: int, tokens: int) -> None:
    content = index_content(
        np.dtype(np.uint16), count,
        lambda low, high: np.full(high - low, tokens),
        lambda low, high: np.arange(low, high) * tokens * 2,
    )  # fmt: skip
    Path(f"{prefix}.idx").write_bytes(content.read(0, content.size_bytes))


def places_of(size: int, count: int, seed: int) -> list[int]:
    """Return where random reads begin."""
    chosen = np.random.default_rng(seed).integers(0, size // READ_BYTES, count)
    return [int(each) * READ_BYTES for each in chosen]


def sequential(path: Path) -> float:
    """Return the seconds of a pass over a file, 8 KB at a time."""
    buffer = bytearray(READ_BYTES)
    with open(path, "rb", buffering=0) as file:

        def read() -> None:
            while file.readinto(buffer):
                pass

        return timed(read)[0]


def random_reads(path: Path, places: list[int]) -> float:
    """Return the seconds of reads of 8 KB at these places."""
    buffer = bytearray(READ_BYTES)
    with open(path, "rb", buffering=0) as file:

        def read() -> None:
            for place in places:
                os.preadv(file.fileno(), [buffer], place)

        return timed(read)[0]


def ratio(raw: Callable[[], float], ours: Callable[[], float], runs: int = RUNS) -> float:
    """Return the median of the raw seconds over ours."""
    return statistics.median(raw() / ours() for _ in range(runs))


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def measure_mount(report: Report, raw: Path, mounted: Path) -> None:
    size = raw.stat().st_size
    warm, cold = places_of(size, RANDOM_READS, 1), places_of(size, COLD_RANDOM_READS, 2)
    for name, path in (("raw", raw), ("mount", mounted)):
        report.add(f"first_pass_{name}_gb_s", size / 1e9 / sequential(path), "GB/s")
    found = {
        "sequential": ratio(lambda: sequential(raw), lambda: sequential(mounted)),
        "random": ratio(lambda: random_reads(raw, warm), lambda: random_reads(mounted, warm)),
    }
    for name, value in found.items():
        report.add(f"mount_{name}_ratio", value)
    report.add("mount_ratio", min(found.values()))

    def fresh(read: Callable[[], float]) -> Callable[[], float]:
        def dropped() -> float:
            drop_caches()
            return read()

        return dropped

    if not os.access("/proc/sys/vm/drop_caches", os.W_OK):
        report.add("mount_cold_ratio", None, "(needs root: it drops the kernel's caches)")
        return
    found = {
        "sequential": ratio(fresh(lambda: sequential(raw)), fresh(lambda: sequential(mounted))),
        "random": ratio(
            fresh(lambda: random_reads(raw, cold)), fresh(lambda: random_reads(mounted, cold))
        ),
    }
    for name, value in found.items():
        report.add(f"mount_cold_{name}_ratio", value)
    report.add("mount_cold_ratio", min(found.values()))


def measure_reader(report: Report, folder: Path) -> None:
    """The reader hook over reads of the raw file, and Megatron's data set by it over the same one
    by Megatron's own memory map: random samples of 8 KB, all of the file cached."""
    import fsspec

    fsspec.config.conf["scalai"] = {"sources": {"c": str(folder / "c")}}
    module: Any = importlib.import_module("megatron.core.datasets.indexed_dataset")
    own = module.IndexedDataset(str(folder / "c"))
    importlib.import_module("scalai.patches.megatron.indexed_source").hook(module)
    hooked = module.IndexedDataset("scalai://bench/dataset/c/source/c")
    places = places_of((folder / "c.bin").stat().st_size, RANDOM_READS, 3)
    samples = [place // READ_BYTES for place in places]
    sequential(folder / "c.bin")

    def read() -> float:
        reader, count = hooked.bin_reader.read, READ_BYTES // 2
        return timed(lambda: [reader(np.uint16, count, place).size for place in places])[0]

    def draw(data_set: Any) -> float:
        # A copy, as a step makes one: of a memory map nothing was read before.
        return timed(lambda: [np.array(data_set[n]).size for n in samples])[0]

    read(), draw(own), draw(hooked)
    report.add("reader_ratio", ratio(lambda: random_reads(folder / "c.bin", places), read))
    report.add("reader_megatron_ratio", ratio(lambda: draw(own), lambda: draw(hooked)))
    report.add("reader_samples_s", len(samples) / draw(hooked), "samples/s")


def measure_repartition(report: Report, many: Path) -> None:
    """Degrees known -> bytes of a rank's first sample, indexes open."""
    seconds = []
    for dp in DPS:
        begin = time.perf_counter()
        view = many / f"dp-{dp - 1}-of-{dp}" / "pass-0"
        with open(f"{view}.idx", "rb") as index, open(f"{view}.bin", "rb", buffering=0) as tokens:
            mapped = mmap.mmap(index.fileno(), 0, access=mmap.ACCESS_READ)
            last = mapped[-8:]
            data = tokens.read(SAMPLE_TOKENS * 2)
            seconds.append(time.perf_counter() - begin)
            mapped.close()
        assert len(data) == SAMPLE_TOKENS * 2
        assert int.from_bytes(last, "little") >= SAMPLES // dp - GLOBAL_BATCH
    report.add("repartition_s", statistics.median(seconds), "s")


def measure_order(report: Report) -> None:
    """Add ``step_ratio`` and ``ledger_kb``."""
    for name, value in dataset_order.measure().items():
        report.add(name, value)


if __name__ == "__main__":
    main()
