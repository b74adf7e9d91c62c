"""A job as machines read it: one live job that loses a host and its coordinator, and is ended by
its control file."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.agents import DEADLINE_S, Agents, tiny_agents
from support.needed import need

need("prometheus_client", "pip install 'scalai[metrics]'")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """Values by name and labels, without the job's."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "job"}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def scrape(agents: Agents) -> Samples:
    """What the newest coordinator serves."""
    (*_, where) = [line for line in logged(agents) if line["event"] == "metrics"]
    with urllib.request.urlopen(f"http://{where['facts']['address']}/metrics", timeout=60) as page:
        return parsed(page.read().decode())


def logged(agents: Agents) -> list[dict[str, Any]]:
    """The log's lines of Scalai."""
    return [json.loads(line) for line in agents.text().splitlines() if line.startswith('{"schema"')]


def watched(agents: Agents) -> "subprocess.Popen[str]":
    """``scalai status --watch`` of the job."""
    words = ["status", "--job", agents.job, "--store-dir", str(agents.store), "--watch", "0.5"]
    return subprocess.Popen(
        [sys.executable, "-m", "scalai", *words], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.fault
def test_machines_read_what_becomes_of_a_job(tmp_path: Path) -> None:
    hook, orders, told = tmp_path / "hook.py", tmp_path / "orders", tmp_path / "told.jsonl"
    hook.write_text(f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read() + '\\n')\n")
    file = tmp_path / "scalai.prom"
    flags = (
        "--metrics-port", "0", "--metrics-file", str(file), "--log-format", "json",
        "--on-event", f"{sys.executable} -S {hook}", "--control-file", str(orders),
        "--durable-dir", str(tmp_path / "durable"),
    )  # fmt: skip
    with tiny_agents(tmp_path, '2 = "tp1"\n1 = "tp1"', slots=1, flags=flags) as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_for_all(2)
        watch = watched(agents)
        agents.wait_until(lambda: scrape(agents)["scalai_workers", ()] == 2, "two workers are seen")
        agents.kill("b", with_its_memory=True)
        agents.wait_for_all(1)
        agents.wait_until(
            lambda: (
                scrape(agents)["scalai_changes_total", (("kind", "recovery"), ("outcome", "done"))]
                == 1
            ),
            "the loss is counted",
        )
        agents.wait_until(  # gauges are of the last look at the job
            lambda: scrape(agents)["scalai_hosts", (("state", "training"),)] == 1, "one host trains"
        )
        found = scrape(agents)
        assert found["scalai_failures_total", (("kind", "host"),)] == 1
        assert found["scalai_stopped_seconds_total", (("reason", "infrastructure_recovery"),)] > 0
        assert found["scalai_training_seconds_total", ()] > 0
        agents.wait_until(lambda: scrape(agents)["scalai_steps_total", ()] > 0, "steps are seen")
        agents.kill_coordinator()
        agents.wait_until(lambda: agents.text().count('"event": "adopted"') == 1, "another one")
        orders.write_text("drain a\n")
        assert agents.exit_code("a") == 75, agents.logs()
        shown, _ = watch.communicate(timeout=DEADLINE_S)
        assert watch.returncode == 75, shown
        assert "coordinator 1)" in shown and "coordinator 2)" in shown, shown
        assert "the same command goes on): saved to the durable directory at step" in shown
        agents.wait_until(lambda: not file.exists(), "an ended job has no metrics")
        text = (agents.reports / "events.jsonl").read_text()
        events = [json.loads(line) for line in text.splitlines()]
        names = [event["event"] for event in events]
        assert {event["schema"] for event in events} == {1}
        (lost,) = [event for event in events if event["event"] == "lost"]
        assert (lost["host"], lost["level"]) == ("b", "WARNING")
        (resized,) = [event["facts"] for event in events if event["event"] == "resized"]
        assert (resized["cause"], resized["kind"]) == ("lost", "recovery")
        assert (resized["before"], resized["after"]) == ("TP1·PP1·DP2", "TP1·PP1·DP1")
        assert resized["paused_s"] > 0 and resized["seconds"]["restore"] > 0
        assert names.count("coordinator") == 2 and "control" in names and names[-1] != "lost"
        heard = [json.loads(line)["event"] for line in told.read_text().splitlines()]
        assert heard.count("lost") == heard.count("resized") == heard.count("started") == 1
        assert heard.count("exit") >= 1 and heard.index("lost") < heard.index("resized")


def status(agents: Agents) -> Any:
    return json.loads(agents.command("status", "--json").stdout)


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.timeout(600)
def test_orders_by_a_file_change_and_save_a_job(tmp_path: Path) -> None:
    orders, durable = tmp_path / "orders", tmp_path / "durable"
    flags = "--control-file", str(orders), "--durable-dir", str(durable), "--log-format", "json"
    degrees = '2 = "tp1"\n1 = "tp1"'
    with tiny_agents(tmp_path, degrees, nodes="1", flags=flags) as agents:

        def answers(event: str) -> list[dict[str, Any]]:
            return [line for line in logged(agents) if line["event"] == event]

        agents.start("a")
        agents.wait_for_all(2)
        orders.write_text("scale --nproc 1\n")
        agents.wait_for_all(1)
        assert len(answers("control")) == 1 and "TP1" in answers("control")[0]["text"]
        orders.write_text("scale --degrees tp9\n")
        agents.wait_until(lambda: bool(answers("control_refused")), "it is refused")
        assert status(agents)["last_refusal"]["who"] == "the control file"
        kept = status(agents)["generation"]
        orders.write_text("snapshot\n")
        agents.wait_until(lambda: bool(answers("archived")), "it is on the disk", 300.0)
        assert status(agents)["generation"] > kept
        assert list((durable / agents.job).glob("generation-*"))
        assert {line["world"] for line in agents.lines()[-3:]} == {1}
