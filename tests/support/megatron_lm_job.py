"""Runs an unmodified pretrain_gpt.py of a Megatron-LM checkout under ``scalai-run``."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scalai.core.dataset.step_lines import StepEntry
from scalai.launch.config.constants import TEST_VARIABLE
from support.accelerator import BACKEND
from support.agents import SCALAI_RUN
from support.ledgers import read_ledger
from support.waiting import wait_until

CHECKOUTS = tuple(filter(None, os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep)))
"""Folders of Megatron-LM checkouts: pretrain_gpt.py and megatron/ lie in each."""
CHECKOUT = CHECKOUTS[0] if CHECKOUTS else None
"""The one whose jobs run."""
NEEDED = ("six", "regex", "yaml", "requests")
"""What megatron.training imports beside megatron-core's own requirements."""
DEADLINE_S = 400.0

MODEL = f"""
  --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
  --max-position-embeddings 32 --group-query-attention --num-query-groups 2 --swiglu
  --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --attention-backend unfused
  --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
  --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
  --distributed-backend {BACKEND} --seed 1234
  --micro-batch-size 1 --global-batch-size 12 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
  --lr-decay-iters 100 --log-interval 1 --eval-iters 1 --eval-interval 10 --num-workers 0
  --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 16
"""


def skip_reason() -> str | None:
    """Say why such jobs cannot run here, or None."""
    if CHECKOUT is None:
        return "MEGATRON_LM_PATH names no Megatron-LM checkout"
    if not Path(CHECKOUT, "pretrain_gpt.py").is_file():
        return f"MEGATRON_LM_PATH={CHECKOUT} holds no pretrain_gpt.py"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"megatron.training needs {', '.join(missing)}" if missing else None


class Job:
    """One elastic job on this machine, with as many ranks as ``nproc`` at first.

    ``script`` lies in the checkout; ``settings`` are lines of ``[resize]``. A folder that is there
    already is that of a job which ended: it goes on.
    """

    def __init__(
        self,
        folder: Path,
        nproc: int,
        degrees: Mapping[int, str],
        flags: Sequence[str],
        *,
        script: str = "pretrain_gpt.py",
        model: str = MODEL,
        settings: str = "",
        constants: Mapping[str, float] = {},
        environment: Mapping[str, str] = {},
        launcher_flags: Sequence[str] = (),
    ) -> None:
        assert CHECKOUT is not None
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._identity = ["--job", folder.name, "--store-dir", str(folder / "store")]
        table = "\n".join(f'{world} = "{wish}"' for world, wish in degrees.items())
        text = f"[degrees]\n{table}\n[probe]\nkind = 'none'\n[resize]\n{settings}\n"
        (folder / "elastic.toml").write_text(text)
        launcher = [str(SCALAI_RUN), "--log-level", "debug", *self._identity, *launcher_flags]
        elastic = ["--elastic", str(folder / "elastic.toml"), "--nproc-per-node", str(nproc)]
        command = [str(Path(CHECKOUT, script)), *model.split(), *flags]
        given = {**os.environ, "SCALAI_LEDGER_DIR": str(folder / "ledger"), **environment}
        # The script ends by itself: a slow machine starts the next workers behind its stop.
        given[TEST_VARIABLE] = json.dumps({"resize.build_timeout_s": 15, **constants})
        # Scripts in folders of their own find the package as Megatron-LM's examples say.
        path = os.pathsep.join([CHECKOUT, given.get("PYTHONPATH", "")])
        with (folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                [*launcher, *elastic, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**given, "PYTHONPATH": path},
                cwd=folder,
            )

    @property
    def pid(self) -> int:
        """The agent's process."""
        return self._process.pid

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def ledger(self) -> Mapping[int, StepEntry]:
        return read_ledger(self._folder / "ledger")

    def verified(self) -> Mapping[str, Any]:
        """What ``scalai ledger verify`` finds in the files of the ranks."""
        command = [sys.executable, "-m", "scalai.launch.cli", "ledger", "verify", "--json"]
        shown = subprocess.run(
            [*command, str(self._folder / "ledger")], timeout=60, stdout=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
        found = json.loads(shown.stdout)
        return {name: found[name] for name in ("is_kept", "breaks", "notes")}

    def wait_for_step(self, step: int) -> None:
        """Wait until the job has done this step."""
        ledger = self._folder / "ledger" / "rank-0.jsonl"
        self.wait_until(
            lambda: ledger.is_file() and f'"step": {step},' in ledger.read_text(), f"step {step}"
        )

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something to happen while the job runs."""

        def came() -> bool:
            assert self._process.poll() is None, f"the job ended before {what}:\n{self.log[-6000:]}"
            return is_so()

        wait_until(came, lambda: f"{what}:\n{self.log[-6000:]}", DEADLINE_S, every_s=0.2)

    def status(self) -> Mapping[str, Any]:
        """What a person sees of it."""
        command = [sys.executable, "-m", "scalai.launch.cli", "status", "--json", *self._identity]
        shown = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
        found: Mapping[str, Any] = json.loads(shown.stdout)
        return found

    def scale(self, nproc: int, degrees: str | None = None) -> None:
        """Ask for another number of ranks, or for other degrees, as a person does."""
        command = [sys.executable, "-m", "scalai.launch.cli", "scale", *self._identity]
        command += ["--nproc", str(nproc), *(["--degrees", degrees] if degrees else [])]
        subprocess.run(command, check=True, timeout=60)

    def finish(self) -> None:
        """Wait for the end of the training, which has to be a good one."""
        if (code := self.exit_code()) != 0:
            pytest.fail(f"the job ended with {code}:\n{self.log[-6000:]}")

    def exit_code(self) -> int:
        """Wait for the end of the job, however it ends."""
        try:
            return self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job never ended:\n{self.log[-6000:]}")

    def leave(self) -> int:
        """Have the job's host leave, as a scheduler does; return the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.exit_code()

    def stop(self) -> None:
        """End the job now, whatever it is doing."""
        for _ in range(2):
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                time.sleep(0.5)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)


def check_same_steps(
    found: Mapping[int, StepEntry], expected: Mapping[int, StepEntry], rel: float = 1e-6
) -> None:
    """Compare everything that steps have consumed and learned; losses by a relative difference."""
    for step, entry in found.items():
        same = expected[step]
        assert entry.loss == pytest.approx(same.loss, rel=rel), step
        assert entry.samples_hash == same.samples_hash, step
        assert (entry.lr, entry.consumed_samples) == (same.lr, same.consumed_samples), step


EVALUATION = re.compile(r"validation loss at iteration (\d+) \| lm loss value: (\S+)")


def evaluations(job: Job) -> dict[str, float]:
    """Return the losses that Megatron-LM itself prints, by iteration."""
    return {step: float(loss) for step, loss in EVALUATION.findall(job.log)}


def make_dataset(prefix: Path) -> None:
    """Write Python's own documentation as an indexed dataset of bytes (.bin, .idx)."""
    subprocess.run([sys.executable, __file__, str(prefix)], check=True, timeout=120)


def _write_dataset(prefix: str) -> None:
    from scalai.patches.megatron import cpu_emulation

    cpu_emulation.install()
    import pydoc_data.topics

    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _, text in sorted(pydoc_data.topics.topics.items()):
        builder.add_item(torch.tensor(list(text.encode()), dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    _write_dataset(sys.argv[1])
