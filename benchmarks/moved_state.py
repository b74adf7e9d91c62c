"""How long a change stands still that moves a large state between two hosts.

    PYTHONPATH=tests python benchmarks/moved_state.py

Two agents of this machine, with a rank each, change the tiny job of the tests from TP2 to TP1: each
rank has one half of 1.07 GB and fetches the other one over loopback. ``transfer_s`` is the wait for
these bytes (``move``) and the rest of the restore.
"""

import tempfile
from pathlib import Path
from statistics import median

from report import Report

from support.agents import tiny_agents

CHANGES = 3
TENSORS = 64
"""Of 16 MiB each."""


def main() -> None:
    report = Report("moved_state")
    found = []
    with (
        tempfile.TemporaryDirectory() as folder,
        tiny_agents(
            Path(folder), '2 = "tp2"\n1 = "tp1"', slots=1, nodes="2", step_s=0.2,
            more=("--ballast", str(TENSORS)), flags=("--replicas", "0"),
        ) as agents,
    ):  # fmt: skip
        for host in "ab":
            agents.start(host)
        agents.wait_for_all(2)
        for number in range(2 * CHANGES):
            agents.wait_for_step(agents.wait_for_world(2) + 6)
            changes = len(agents.resizes())
            agents.scale(degrees="tp2" if number % 2 else "tp1")
            agents.wait_until(lambda: len(agents.resizes()) > changes, "it has changed", 300.0)  # noqa: B023
            if number % 2 == 0:
                found.append(agents.resizes()[-1])
        agents.check_each_once()
    transfers = [each["seconds"]["move"] + each["seconds"]["restore"] for each in found]
    report.add("moved_gb", found[-1]["bytes_remote"] / 1e9, "GB")
    report.add("transfer_s", median(transfers), "s")
    report.add("transfer_each_s", [round(each, 2) for each in transfers])
    report.add("paused_s", median(each["paused_s"] for each in found), "s")
    report.add("paused_each_s", [round(each["paused_s"], 2) for each in found])
    report.finish()


if __name__ == "__main__":
    main()
