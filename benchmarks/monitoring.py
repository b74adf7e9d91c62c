"""The picture of docs/monitoring.md: a tiny job that grows, shrinks and loses a host, scraped by
Prometheus (Debian: prometheus) and drawn by the expressions of the dashboard.

    PYTHONPATH=tests python benchmarks/monitoring.py --picture docs/monitoring.svg
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.agents import Agents, tiny_agents
from support.ports import free_port
from support.waiting import wait_until

DASHBOARD = Path(__file__).parents[1] / "configs" / "monitoring" / "dashboard.json"
DEGREES = '4 = "tp2"\n3 = "tp1"\n2 = "tp2"\n1 = "tp1"'
EVERY_S, RATE_S = 1, 15
REST_S = 15.0
"""Training between two events, in seconds."""
BASE = {"s": "s", "percentunit": "", "short": "", "bytes": "B"}


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Scrape a target each second. Yields the address of its answers."""
    port = free_port("127.0.0.1")
    config = folder / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: {EVERY_S}s, evaluation_interval: {EVERY_S}s}}\n"
        f"rule_files: [{DASHBOARD.parent / 'alerts.yml'}]\nscrape_configs:\n"
        f"- {{job_name: scalai, honor_labels: true, static_configs: [{{targets: ['{target}']}}]}}\n"
    )
    where = f"127.0.0.1:{port}"
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}",
             f"--web.listen-address={where}"], stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_until(lambda: "ready to receive" in (folder / "prometheus.log").read_text(), "ready")
        yield f"http://{where}/api/v1"
    finally:
        process.terminate()
        process.wait(30)


def asked(api: str, path: str, **values: Any) -> Any:
    """An answer of Prometheus."""
    where = f"{api}/{path}?{urllib.parse.urlencode(values)}"
    with urllib.request.urlopen(where, timeout=60) as page:
        return json.loads(page.read())["data"]


def run(agents: Agents) -> None:
    """What happens to the job."""
    agents.start("a")
    agents.wait_for_all(2)
    time.sleep(REST_S)
    agents.start("b")
    agents.wait_for_all(4)
    time.sleep(REST_S)
    agents.scale(3)
    agents.wait_for_all(3)
    time.sleep(REST_S)
    agents.scale(4)
    agents.wait_for_all(4)
    time.sleep(REST_S)
    agents.kill("b", with_its_memory=True)
    agents.wait_for_all(2)
    time.sleep(REST_S)
    notice = agents.folder / "notice"
    agents.start("b", "--preemption", f"file:{notice}")
    agents.wait_for_all(4)
    time.sleep(REST_S)
    notice.write_text("30")
    agents.wait_for_all(2)
    time.sleep(REST_S)


def legend(form: str, labels: Mapping[str, str]) -> str:
    """A series' name by a panel's form."""
    for key, value in labels.items():
        form = form.replace(f"{{{{{key}}}}}", value)
    return form


def draw(api: str, job: str, began: float, ended: float, picture: Path) -> int:
    """Draw the dashboard's rows. Returns the number of series with values."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows: list[list[dict[str, Any]]] = []
    for panel in panels:
        if panel["type"] == "row":
            rows.append([panel])
        else:
            rows[-1].append(panel)
    plt.rcParams.update({"font.size": 6, "svg.fonttype": "none", "axes.linewidth": 0.4})
    figure, axes = plt.subplots(
        len(rows), 4, figsize=(11, 9), sharex=True, squeeze=False, layout="constrained"
    )
    count = 0
    for row, places in zip(rows, axes, strict=True):
        places[0].set_ylabel(row[0]["title"], fontweight="bold")
        for panel, place in zip(row[1:], places, strict=False):
            lines: dict[str, tuple[list[float], list[float]]] = {}
            for target in panel["targets"]:
                expr = target["expr"].replace("$job", job).replace("$__rate_interval", f"{RATE_S}s")
                found = asked(api, "query_range", query=expr, start=began, end=ended, step=4)
                for series in found["result"]:
                    points = [(at - began, float(value)) for at, value in series["values"]]
                    if any(value for _, value in points):
                        lines[legend(target["legendFormat"], series["metric"])] = (
                            [at for at, _ in points], [value for _, value in points],
                        )  # fmt: skip
            count += len(lines)
            custom = panel["fieldConfig"]["defaults"]["custom"]
            if custom["stacking"]["mode"] == "normal" and lines:
                times = sorted({at for of, _ in lines.values() for at in of})
                known = [dict(zip(*each, strict=True)) for each in lines.values()]
                values = [[each.get(at, 0.0) for at in times] for each in known]
                place.stackplot(
                    times, values, labels=list(lines), colors=plt.get_cmap("tab20")(range(20))
                )
            else:
                for name, line in lines.items():
                    place.plot(*line, label=name, linewidth=0.9)
            unit = BASE[panel["fieldConfig"]["defaults"]["unit"]]
            place.set_title(panel["title"] + (f" [{unit}]" if unit else ""), fontsize=6.5)
            place.set_ylim(bottom=0)
            place.locator_params(nbins=4)
            if lines:
                columns = 1 + (len(lines) > 4)
                place.legend(fontsize=5, frameon=False, loc="upper left", ncols=columns)
        for place in places[len(row) - 1 :]:
            place.axis("off")
    for place in axes[-1]:
        place.set_xlabel("s")
    figure.savefig(picture, metadata={"Date": None})
    # A tenth of a point is seen by nobody.
    text = re.sub(r'(?<= d=")[^"]*', _rounded, picture.read_text())
    picture.write_text(re.sub(r"\n\s*", "\n", text))
    return count


def _rounded(path: "re.Match[str]") -> str:
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}", path[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--picture", type=Path, required=True, metavar="FILE.svg")
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        raise SystemExit("prometheus is not installed (Debian: prometheus)")
    folder = Path(tempfile.mkdtemp(prefix="scalai-monitoring-"))
    port = free_port("127.0.0.1")
    flags = ("--metrics-port", str(port), "--nnodes", "1:2")
    settings = {"store": "snapshot_every = 100"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        with (
            prometheus(folder, f"127.0.0.1:{port}") as api,
            tiny_agents(folder, DEGREES, slots=2, flags=flags, settings=settings) as agents,
        ):
            began = time.time()
            run(agents)
            ended = time.time()
            count = draw(api, agents.job, began, ended, options.picture)
            fired = asked(api, "query_range", query="ALERTS", start=began, end=ended, step=2)
            alerts = {each["metric"]["alertname"] for each in fired["result"]}
            changes = [[r["kind"], r["before"], r["after"]] for r in agents.resizes()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"benchmark": "monitoring", "seconds": round(ended - began), "series": count,
                      "alerts": sorted(alerts), "changes": changes}))  # fmt: skip


if __name__ == "__main__":
    main()
