"""The commands that ``reshard.py`` times, and the files that it gives them."""

import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from scalai.converters.checkpoint import Checkpoint, FilePiece, ReadOptions, WriteOptions, place
from scalai.converters.engine import Conversion, Limits
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.core.tensors.collection import MAX_NDIM, Tensor

WORKERS = 2
SAMPLE_S = 0.02
"""Between two looks at a command's memory."""


@dataclass(frozen=True)
class Ran:
    """What a command took.

    ``working_s``: between its first and its last progress, for our commands. ``peak_bytes``: the
    most anonymous and shared memory that its processes had together. ``cpu_s``: their processor
    time.
    """

    seconds: float
    working_s: float = 0.0
    peak_bytes: int = 0
    cpu_s: float = 0.0


class Command(Protocol):
    """Turns the files of ``source`` into ``destination``."""

    def __call__(self, source: Path, destination: Path, *flags: str) -> Ran: ...


def copy_files(source: Path, destination: Path, *flags: str) -> Ran:
    """Copy all files by ``cp`` and bring them to disk."""
    script = 'cp -r "$0" "$1" && find "$1" -type f -exec sync {} +'
    return _run(["sh", "-c", script, str(source), str(destination)])


def scalai(source: Path, destination: Path, *flags: str) -> Ran:
    """Run ``scalai reshard``."""
    return _reshard(["-m", "scalai.launch.cli"], source, destination, flags)


def scalai_of(checkout: Path) -> Command:
    """Return ``scalai reshard`` of another checkout, which has its environment in ``.venv``."""
    python = str(checkout / ".venv" / "bin" / "python")

    def run(source: Path, destination: Path, *flags: str) -> Ran:
        return _reshard(["-m", "scalai.launch.cli"], source, destination, flags, python)

    return run


def scalai_unproven(source: Path, destination: Path, *flags: str) -> Ran:
    """Run ``scalai reshard`` without its proof."""
    script = Path(__file__).with_name("reshard_unproven.py")
    return _reshard([str(script)], source, destination, flags)


def to_universal(source: Path, destination: Path, *flags: str) -> Ran:
    """Run DeepSpeed's converter on the newest tag, and bring its files to disk."""
    tag = source / (source / "latest").read_text().strip()
    folders = ["--input_folder", str(tag), "--output_folder", str(destination)]
    workers = ["--num_extract_workers", str(WORKERS), "--num_merge_workers", str(WORKERS)]
    convert = ["-m", "deepspeed.checkpoint.ds_to_universal", *folders, *workers]
    convert += ["--inject_missing_state"]
    ran = _run([sys.executable, *convert])
    synced = _run(["sh", "-c", 'find "$0" -type f -exec sync {} +', str(destination)])
    return replace(ran, seconds=ran.seconds + synced.seconds)


def torchrun(arguments: Sequence[str]) -> Ran:
    """Run a job of two ranks under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    return _run([sys.executable, *launcher, *arguments])


def drop_caches() -> bool:
    """Make the machine forget files; return whether it does that for us."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def size_bytes(folder: Path) -> int:
    """Return the bytes of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def grow(saved: Path, large: Path, least_bytes: int, tp: int) -> None:
    """Write a checkpoint like ``saved`` that has more layers: each of its layers several times."""
    source = open_checkpoint(saved, ReadOptions())
    times = -(-least_bytes // size_bytes(saved))
    grown = _with_layers(source, times)
    target = layout_named("torch_dist").lay_out(
        grown, WriteOptions({**source.values.degrees, "tp": tp})
    )
    Conversion(grown, target, large, Limits(1 << 30, WORKERS)).run()


def _with_layers(source: Checkpoint, times: int) -> Checkpoint:
    """Return a checkpoint with ``times`` as many layers, that lie where the present ones do."""
    placed = source.placed
    names = [tensor.name for tensor in placed.collection.tensors]
    layer = re.compile(r"(?<=\.layers\.)\d+")
    count = 1 + max(int(found[0]) for name in names if (found := layer.search(name)))
    pieces = []
    for row in range(len(placed.collection)):
        tensor, box = placed.collection.box(row)
        stride = tuple(placed.stride[row, MAX_NDIM - len(box.shape) :].tolist())
        file, begin = placed.files[placed.file[row]].path, int(placed.begin[row])
        found = layer.search(tensor.name)
        for turn in range(times if found else 1):
            name = tensor.name
            if found:
                name = layer.sub(str(turn * count + int(found[0])), name)
            pieces.append(
                FilePiece(Tensor(name, tensor.shape, tensor.dtype), box, file, begin, stride)
            )
    return replace(source, placed=place(pieces, placed.files), duplicates=None)


def _reshard(
    script: Sequence[str],
    source: Path,
    destination: Path,
    flags: Sequence[str],
    python: str = sys.executable,
) -> Ran:
    command = [python, *script, "reshard", str(source), str(destination), "--json", *flags]
    ran, output = _run_told(command)
    moments = [event["seconds"] for event in map(json.loads, output.splitlines())
               if event["event"] == "progress"]  # fmt: skip
    return replace(ran, working_s=moments[-1] - moments[0])


def _run(command: Sequence[str]) -> Ran:
    return _run_told(command)[0]


def _run_told(command: Sequence[str]) -> tuple[Ran, str]:
    """Run a command; return what it took, and its output. Ends the benchmark where it fails."""
    began, cpu_s = time.perf_counter(), _cpu_s_of_children()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    peak = _Peak(process.pid)
    output, _ = process.communicate()
    seconds = time.perf_counter() - began
    peak_bytes = peak.stop()
    if process.returncode:
        lines = "\n".join(output.splitlines()[-40:])
        raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}:\n{lines}")
    return Ran(seconds, peak_bytes=peak_bytes, cpu_s=_cpu_s_of_children() - cpu_s), output


def _cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Peak:
    """Watches the memory of a process and its children."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End watching; return the most bytes that were seen."""
        self._ended.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._peak = max(self._peak, _memory_bytes(self._pid))


def _memory_bytes(pid: int) -> int:
    """Return the anonymous and shared bytes of a process and its children, as far as they are
    there. Pages that a fork shares count once a process: an upper bound."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    own = sum(int(kilobytes) for kilobytes in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status))
    return own * 1024 + sum(_memory_bytes(int(child)) for child in children)
