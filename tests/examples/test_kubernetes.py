"""The manifests of examples/kubernetes: valid by the published schemas, in agreement with
themselves and with what docs/cluster.md promises of a pod's end."""

import argparse
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from scalai.core.exit_codes import RESUMABLE
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import Box, whole
from scalai.core.tensors.replicas import memory_of, ring_of
from scalai.launch.commands.autoscale import OWNER, add_parser
from scalai.launch.commands.autoscale_jobs import read_job
from scalai.launch.commands.autoscaler import read_devices
from scalai.launch.commands.check_elastic import check_elastic
from scalai.launch.commands.kueue import GATE, QUEUE_LABEL
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from support.job_controller import DISRUPTION, JobState, fate_of
from support.manifests import (
    AUTOSCALER,
    BASE,
    FOLDER,
    GPU,
    TRAINER,
    built,
    bytes_of,
    flags_of,
    job_of,
    read,
)

ROOT = Path(__file__).parents[2]
FOLDERS = [BASE, GPU, AUTOSCALER]
JOB_NAME = "batch.kubernetes.io/job-name"
"""Label that the Job gives its pods."""
RELEASES = ["1.31", "1.34", "1.37"]
"""Of Kubernetes: the first with all fields, and the newest."""


def runtime() -> dict[str, Any]:
    """The Trainer's Job of a node."""
    (found,) = (
        each for each in read(TRAINER / "runtime.yaml") if each["kind"] == "TrainingRuntime"
    )
    return found


def jobs() -> dict[str, dict[str, Any]]:
    """All Jobs, by where they are from."""
    (node,) = runtime()["spec"]["template"]["spec"]["replicatedJobs"]
    return {"base": job_of(built(BASE)), "gpu": job_of(built(GPU)), "trainer": node["template"]}


JOBS = pytest.mark.parametrize("name", ["base", "gpu", "trainer"])


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_the_manifests_are_valid_by_the_published_schemas(release: str) -> None:
    objects = [each for folder in FOLDERS for each in built(folder).values()]
    objects += read(AUTOSCALER / "kueue.yaml")
    node = jobs()["trainer"]  # the Trainer's template is that of a Job
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}}
    for each in (*objects, made | {"spec": node["spec"]}):
        kubernetes_validate.validate(each, release, strict=True)
    assert {each["kind"] for each in objects} == {
        "ClusterRole", "ClusterRoleBinding", "ConfigMap", "Deployment", "Job", "NetworkPolicy",
        "PersistentVolumeClaim", "Role", "RoleBinding", "Service", "ServiceAccount",
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.name))
def test_kustomize_builds_what_the_tests_read(folder: Path) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    digest = re.compile(r"\b(gpt-elastic)-[a-z0-9]{10}\b")
    objects = yaml.safe_load_all(digest.sub(r"\1", done.stdout))
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert found == built(folder)


@JOBS
def test_the_command_line_is_one_of_this_product(name: str) -> None:
    container = container_of(jobs()[name])
    assert container["command"] == ["scalai-run"], "without a shell it gets the signals"
    options = parse_options([word.replace("$(POD_NAME)", "gpt-0-x") for word in container["args"]])
    assert options.coordinator_lease == "kubernetes:" and options.job == "gpt"
    spec = jobs()[name]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > float(flags_of(container)["--drain-timeout"])
    shm = [each["name"] for each in container["volumeMounts"] if each["mountPath"] == "/dev/shm"]
    (store,) = (each["emptyDir"] for each in spec["volumes"] if [each["name"]] == shm)
    assert store["medium"] == "Memory"
    for kind in ("requests", "limits"):
        memory = bytes_of(container["resources"][kind]["memory"])
        assert bytes_of(store["sizeLimit"]) < memory / 2, "the store is the pod's own memory"


def test_the_elastic_configuration_of_the_base_gives_each_size_its_degrees() -> None:
    words = container_of(job_of(built(BASE)))["args"]
    words = [w.replace("/etc/scalai", str(BASE)).replace("$(POD_NAME)", "p") for w in words]
    spec = JobSpec.read(parse_options(words))
    report = check_elastic(spec.options, spec.config, 1, spec.deepspeed)
    table = str(report).partition("ranks  degrees")[2]
    assert table.count("by [degrees]") == len(table.splitlines()) - 1 >= 7, report
    assert (ROOT / words[-2]).exists() and spec.is_elastic


@pytest.mark.parametrize("folder", [BASE, GPU], ids=lambda folder: str(folder.name))
def test_what_the_manifests_name_is_there(folder: Path) -> None:
    objects = built(folder)
    job = job_of(objects)
    spec, container = job["spec"]["template"]["spec"], container_of(job)
    names = {
        "PersistentVolumeClaim": [each["persistentVolumeClaim"]["claimName"]
                                  for each in spec["volumes"] if "persistentVolumeClaim" in each],
        "ConfigMap": [e["configMap"]["name"] for e in spec["volumes"] if "configMap" in e],
        "ServiceAccount": [spec["serviceAccountName"]], "Service": [spec["subdomain"]],
    }  # fmt: skip
    assert all((kind, name) in objects for kind, listed in names.items() for name in listed)
    name = job["metadata"]["name"]
    service, pods = objects["Service", spec["subdomain"]]["spec"], {JOB_NAME: name}
    assert service["selector"] == pods
    network = objects["NetworkPolicy", name]["spec"]
    assert network["podSelector"] == {"matchLabels": pods}
    assert network["ingress"] == [{"from": [{"podSelector": {"matchLabels": pods}}]}]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    assert flags_of(container)["--coordinator"] == f"{name}-0.{spec['subdomain']}:29400"
    size = job["spec"]["parallelism"], job["spec"]["completions"]
    fewest, most = map(int, flags_of(container)["--nnodes"].split(":"))
    assert job["spec"]["completionMode"] == "Indexed"
    assert size[0] == size[1] and fewest <= size[0] <= most
    (secret,) = (e["valueFrom"]["secretKeyRef"]["name"]
                 for e in container["env"] if "secretKeyRef" in e.get("valueFrom", {}))  # fmt: skip
    assert f"create secret generic {secret} " in (BASE / "kustomization.yaml").read_text()
    rules = {rule["resources"][0]: rule for rule in objects["Role", name]["rules"]}
    assert rules["leases"]["verbs"] == ["get", "create", "update"]
    assert rules["jobs"]["verbs"] == ["get", "patch"] and rules["jobs"]["resourceNames"] == [name]
    bound = objects["RoleBinding", name]
    assert bound["roleRef"]["name"] == name
    assert bound["subjects"] == [{"kind": "ServiceAccount", "name": spec["serviceAccountName"]}]


def test_the_autoscaler_may_do_what_it_does_to_the_jobs_of_its_files_and_no_more(
    tmp_path: Path,
) -> None:
    objects, base = built(AUTOSCALER), built(BASE)
    pod = objects["Deployment", "autoscale"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    options = parser.parse_args(container["args"])
    assert (options.engine, options.lease) == ("kubernetes", "kubernetes:")
    files = objects["ConfigMap", "autoscale-jobs"]["data"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert str(options.jobs) == mounts["jobs"] and options.devices == f"{mounts['jobs']}/devices"
    per_host = int(flags_of(container_of(job_of(base)))["--nproc-per-node"])
    (tmp_path / "devices").write_text(files["devices"])
    assert read_devices(str(tmp_path / "devices")).per_host == per_host
    (tmp_path / "gpt.toml").write_text(files["gpt.toml"])
    file = read_job(tmp_path / "gpt.toml")
    flags = flags_of(container_of(job_of(base)))
    assert (file.job, file.lease) == (flags["--job"], flags["--coordinator-lease"])
    assert file.devices == tuple(per_host * int(n) for n in flags["--nnodes"].split(":"))
    (tokens,) = (v["projected"] for v in pod["spec"]["volumes"] if v["name"] == "tokens")
    paths = {f"{mounts['tokens']}/{item['path']}": source["secret"]["name"]
             for source in tokens["sources"] for item in source["secret"]["items"]}  # fmt: skip
    assert paths == {file.token_file: "gpt-token"}
    rights = {
        (rule["resources"][0], *rule.get("resourceNames", [])): rule["verbs"]
        for rule in objects["Role", "autoscale"]["rules"]
    }
    assert rights == {
        ("jobs", file.engine): ["get", "patch"], ("leases", f"scalai-{file.job}"): ["get"],
        ("leases", f"scalai-{OWNER}"): ["get", "update"], ("leases",): ["create"],
    }  # fmt: skip
    network = objects["NetworkPolicy", "gpt-from-autoscale"]["spec"]
    assert network["podSelector"] == base["NetworkPolicy", "gpt"]["spec"]["podSelector"]
    assert network["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": pod["metadata"]["labels"]}}]}
    ]


@pytest.mark.parametrize("pods", [1, 2, 4, 8])
def test_the_store_of_the_manifests_is_computed_by_the_rule_beside_it(pods: int) -> None:
    """Pods of data parallelism: each holds the weights, and a part of the optimizer's state."""
    count, names = 800, [f"pod-{at}" for at in range(pods)]
    state = [("param/w", "BF16"), *((f"{kind}/w", "F32") for kind in ("main", "m", "v"))]
    held = {}
    for at, name in enumerate(names):
        part = Box((count * at // pods,), (count // pods,))
        held[name] = Collection.of(
            [
                (Tensor(tensor, (count,), dtype), whole((count,)) if dtype == "BF16" else part)
                for tensor, dtype in state
            ]
        )
    whole_state = count * (2 + 3 * 4)
    for memory in memory_of(ring_of(dict.fromkeys(names, ""), 1), held, {}):
        by_rule = 2 * whole_state if pods == 1 else 2 * count * (2 + 24 / pods)
        assert memory.needed == by_rule <= 2 * whole_state
    (store,) = (each for each in job_of(built(GPU))["spec"]["template"]["spec"]["volumes"]
                if each["name"] == "store")  # fmt: skip
    assert bytes_of(store["emptyDir"]["sizeLimit"]) > 2 * 8e9 * 14 * 9 / 8


# ---------------------------------------------------------------------- the end of a pod

WORDS = {
    "the training is done: the Job is complete": "job complete",
    "a new pod, not counted": "replaced",
    "a new pod, counted against `backoffLimit`": "counted, replaced",
    "the Job fails": "job failed",
}


def promises() -> Iterator[tuple[int, frozenset[str], str]]:
    """Rows of the table in docs/cluster.md: exit code, conditions of the pod, its fate."""
    page = (ROOT / "docs" / "cluster.md").read_text().partition("## Kubernetes")[2]
    rows = page.partition("| the pod ends with | Kubernetes |\n|---|---|\n")[2].partition("\n\n")[0]
    for row in rows.splitlines():
        _, ends, fate, _ = (cell.strip() for cell in row.split("|"))
        conditions = frozenset({DISRUPTION}) if "eviction" in ends else frozenset[str]()
        for code in re.findall(r"\d+", ends):
            yield int(code), conditions, WORDS[fate]


@pytest.mark.fault
@JOBS
def test_what_becomes_of_a_pod_is_what_the_page_promises(name: str) -> None:
    job = jobs()[name]
    container = container_of(job)
    drained = int(flags_of(container)["--drained-exit-code"])
    promised = {(code, conditions): fate for code, conditions, fate in promises()}
    codes = {0, drained, RESUMABLE, 1, 2, 3, 128 + 9, 128 + 15}
    assert {code for code, conditions in promised if not conditions} == codes
    for (code, conditions), fate in promised.items():
        found = fate_of(job, container["name"], code, conditions)
        if name == "trainer" and code == 0:
            assert found == "index complete", "JobSet ends with all of its pods"
        else:
            assert found == fate, (code, conditions)


@pytest.mark.fault
def test_a_drained_pod_comes_again_for_ever_and_a_failing_one_until_the_limit() -> None:
    job = job_of(built(BASE))
    state, container = JobState(job), container_of(job)["name"]
    for _ in range(100):
        state.end(1, fate_of(job, container, 76))
    assert state.wanted() == [0, 1, 2, 3]
    for _ in range(job["spec"]["backoffLimit"]):
        state.end(1, fate_of(job, container, 1))
    assert state.wanted() == [0, 1, 2, 3]
    state.end(1, fate_of(job, container, 1))
    assert state.result == "Failed" and not state.wanted()


# ---------------------------------------------------------------------- other operators


def test_kueue_may_change_the_size_of_the_job() -> None:
    metadata = job_of(built(GPU))["metadata"]
    assert metadata["labels"] == {QUEUE_LABEL: "training"}
    annotations = metadata["annotations"]
    assert annotations[GATE] == "true"
    assert "kueue.x-k8s.io/job-min-parallelism" not in annotations, "it excludes elastic jobs"


def test_the_autoscaler_may_read_the_queue_of_the_job_and_change_nothing_of_kueue() -> None:
    rules = {
        (rule["resources"][0], *rule.get("resourceNames", [])): rule["verbs"]
        for each in read(AUTOSCALER / "kueue.yaml")
        for rule in each.get("rules", [])
    }
    queue = job_of(built(GPU))["metadata"]["labels"][QUEUE_LABEL]
    assert rules == {
        ("localqueues", queue): ["get"], ("workloads",): ["list"],
        ("clusterqueues", "team"): ["get"],
    }  # fmt: skip


def test_the_trainer_sets_no_variable_that_wins_over_the_range() -> None:
    """It sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK and the master's address and port."""
    found = runtime()
    assert found["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert found["metadata"]["labels"] == {"trainer.kubeflow.org/framework": "torch"}
    assert "torch" in found["spec"]["mlPolicy"]
    (node,) = found["spec"]["template"]["spec"]["replicatedJobs"]
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert node["name"] == "node" and node["template"]["metadata"]["labels"] == {label: "trainer"}
    container = container_of(node["template"])
    assert container["name"] == "node"
    assert not [each for each in container["env"] if each["name"].startswith("PET_")]
    flags = flags_of(container)
    fewest, most = map(int, flags["--nnodes"].split(":"))
    assert fewest < found["spec"]["mlPolicy"]["numNodes"] <= most
    assert "--coordinator" not in flags, "it is at PET_MASTER_ADDR"
    job = next(each for each in read(TRAINER / "runtime.yaml") if each["kind"] == "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == found["metadata"]["name"]
    assert job["spec"]["trainer"]["numNodes"] == found["spec"]["mlPolicy"]["numNodes"]


def test_the_address_that_the_trainer_gives_is_the_coordinators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"NNODES": "4", "NPROC_PER_NODE": "1", "NODE_RANK": "2",
             "MASTER_ADDR": "gpt-node-0-0.gpt", "MASTER_PORT": "29500"}  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"PET_{name}", value)
    words = container_of(jobs()["trainer"])["args"]
    options = parse_options([word.replace("$(POD_NAME)", "p") for word in words])
    assert options.coordinator == "gpt-node-0-0.gpt:29500"
    assert (options.min_nodes, options.max_nodes) == (1, 4)


def test_the_recipe_of_the_image_installs_what_there_is() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", text, re.M)
    assert set(extras.split(",")) <= settings["optional-dependencies"].keys()
    (user,) = re.findall(r"^USER (\d+)$", text, re.M)
    (command,) = re.findall(r"^CMD (.+)$", text, re.M)
    assert yaml.safe_load(command)[0] in settings["scripts"]
    for name in ("base", "gpu", "trainer"):
        pod = jobs()[name]["spec"]["template"]["spec"]["securityContext"]
        assert pod["runAsNonRoot"] and pod["runAsUser"] == int(user)
