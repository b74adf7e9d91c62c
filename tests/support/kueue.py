"""Kueue beside the tests' API server: one queue, and the Workloads of elastic Jobs, which grow by a
slice that takes the place of the former one once it is admitted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

QUEUES = "/apis/kueue.x-k8s.io/v1beta2/"
LABEL, GATE = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/elastic-job"
UID, REPLACES = "kueue.x-k8s.io/job-uid", "kueue.x-k8s.io/workload-slice-replacement-for"
GPU, FLAVOR = "nvidia.com/gpu", "h100"


@dataclass
class Kueue:
    """A LocalQueue ``training`` of a ClusterQueue ``team``, with devices of one flavor.

    Attributes:
        nominal: Its devices.
        has_cohort: It may borrow; ``lent`` is what its cohort lends.
        limit: Most that it may borrow; None: any number.
        others: Devices of other Workloads.
    """

    nominal: int
    has_cohort: bool = False
    lent: int = 0
    limit: int | None = None
    others: int = 0
    workloads: list[dict[str, Any]] = field(default_factory=list)
    _jobs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, name: str, job: dict[str, Any]) -> None:
        """Take a new elastic Job, as the webhooks do."""
        metadata, pod = job["metadata"], job["spec"]["template"]["spec"]
        metadata["uid"] = f"uid-of-{name}"
        metadata.setdefault("labels", {})[LABEL] = "training"
        metadata.setdefault("annotations", {})[GATE] = "true"
        pod["schedulingGates"] = [{"name": GATE}]
        pod["containers"][0].setdefault("resources", {})["requests"] = {"cpu": "64", GPU: "8"}
        job["spec"]["suspend"] = True
        self.reconcile(name, job)

    def reconcile(self, name: str, job: dict[str, Any]) -> None:
        """Make a Job's Workloads anew after a change of its size."""
        self._jobs[name] = job
        count = job["spec"]["parallelism"]
        living = [each for each in self._of(name) if not _is(each, "Finished")]
        newest = living[-1] if living else None
        if newest is None or (_is(newest, "QuotaReserved") and count > _count(newest)):
            self._add(name, job, count, newest)
        else:
            newest["spec"]["podSets"][0]["count"] = count
        self.admit()

    def admit(self) -> None:
        """Give the free quota to Workloads that wait, the oldest first."""
        for each in self.workloads:
            if not _is(each, "QuotaReserved") and not _is(each, "Finished"):
                self._admit(each)

    def _admit(self, workload: dict[str, Any]) -> None:
        count, name = _count(workload), workload["metadata"]["name"]
        former = workload["metadata"]["annotations"].get(REPLACES, "").rpartition("/")[2]
        old = next((each for each in self.workloads if each["metadata"]["name"] == former), None)
        most = self.nominal + min(self.lent, self.lent if self.limit is None else self.limit)
        short = self.reserved + 8 * (count - (_held(old) if old else 0)) - most
        total = {"cpu": str(64 * count), GPU: str(8 * count)}
        if short > 0:
            message = (
                f"couldn't assign flavors to pod set main: insufficient unused quota for {GPU} in "
                f"flavor {FLAVOR}, {short} more needed"
            )
            _set(workload, "QuotaReserved", "False", "Pending", message)
            workload["status"]["resourceRequests"] = [{"name": "main", "resources": total}]
            return
        workload["status"].pop("resourceRequests", None)
        workload["status"]["admission"] = {
            "clusterQueue": "team",
            "podSetAssignments": [
                {"name": "main", "flavors": {"cpu": "hosts", GPU: FLAVOR}, "resourceUsage": total,
                 "count": count}
            ],
        }  # fmt: skip
        _set(workload, "QuotaReserved", "True", "QuotaReserved", "Quota reserved in team")
        _set(workload, "Admitted", "True", "Admitted", "The workload is admitted")
        if old is not None:
            _set(old, "Finished", "True", "WorkloadSliceReplaced", f"Replaced by {name}")
        self._jobs[workload["metadata"]["ownerReferences"][0]["name"]]["spec"]["suspend"] = False

    @property
    def reserved(self) -> int:
        """Devices that all Workloads have."""
        return self.others + 8 * sum(_held(each) for each in self.workloads)

    def _of(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.workloads if e["metadata"]["labels"][UID] == f"uid-of-{name}"]

    def _add(
        self, name: str, job: dict[str, Any], count: int, before: dict[str, Any] | None
    ) -> None:
        number = len(self.workloads)
        annotations = {GATE: "true"}
        if before is not None:
            annotations[REPLACES] = f"train/{before['metadata']['name']}"
        self.workloads.append(
            {
                "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
                "metadata": {
                    "name": f"job-{name}-{number}", "namespace": "train",
                    "creationTimestamp": f"2030-01-31T12:{number // 60:02}:{number % 60:02}Z",
                    "labels": {UID: job["metadata"]["uid"]}, "annotations": annotations,
                    "ownerReferences": [
                        {"apiVersion": "batch/v1", "kind": "Job", "name": name, "controller": True,
                         "uid": job["metadata"]["uid"]}
                    ],
                },
                "spec": {
                    "queueName": "training",
                    "podSets": [{"name": "main", "count": count, "template": {"spec": {
                        "containers": job["spec"]["template"]["spec"]["containers"],
                        "restartPolicy": "Never"}}}],
                },
                "status": {"conditions": []},
            }
        )  # fmt: skip

    def answer(self, path: str) -> tuple[int, Any] | None:
        """The answer to a GET; None: there is no such object."""
        url = urlsplit(path)
        where, query = url.path.removeprefix(QUEUES), parse_qs(url.query)
        if where == "namespaces/train/localqueues/training":
            return 200, {"metadata": {"name": "training"}, "spec": {"clusterQueue": "team"}}
        if where == "clusterqueues/team":
            return 200, self.queue()
        if where != "namespaces/train/workloads":
            return None
        (selector,), (limit,) = query["labelSelector"], query["limit"]
        (begin,) = map(int, query.get("continue", ["0"]))
        listed = [e for e in self.workloads if f"{UID}={e['metadata']['labels'][UID]}" == selector]
        end = begin + int(limit)
        more = {"continue": str(end)} if end < len(listed) else {}
        return 200, {"kind": "WorkloadList", "metadata": more, "items": listed[begin:end]}

    def queue(self) -> dict[str, Any]:
        """The ClusterQueue."""
        quota: dict[str, str] = {"name": GPU, "nominalQuota": str(self.nominal)}
        if self.limit is not None:
            quota["borrowingLimit"] = str(self.limit)
        borrowed = max(0, self.reserved - self.nominal)
        usage = {"name": GPU, "total": str(self.reserved), "borrowed": str(borrowed)}
        return {
            "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ClusterQueue",
            "metadata": {"name": "team"},
            "spec": {
                **({"cohortName": "all"} if self.has_cohort else {}),
                "resourceGroups": [
                    {"coveredResources": [GPU],
                     "flavors": [{"name": FLAVOR, "resources": [quota]}]},
                    {"coveredResources": ["cpu"], "flavors": [
                        {"name": "hosts", "resources": [{"name": "cpu", "nominalQuota": "100k"}]}
                    ]},
                ],
            },
            "status": {"flavorsReservation": [{"name": FLAVOR, "resources": [usage]}]},
        }  # fmt: skip


def _count(workload: Mapping[str, Any]) -> int:
    return int(workload["spec"]["podSets"][0]["count"])


def _held(workload: Mapping[str, Any]) -> int:
    """Pods whose quota a Workload holds."""
    if not _is(workload, "QuotaReserved") or _is(workload, "Finished"):
        return 0
    return min(_count(workload), workload["status"]["admission"]["podSetAssignments"][0]["count"])


def _is(workload: Mapping[str, Any], kind: str) -> bool:
    listed = workload["status"]["conditions"]
    return any(each["type"] == kind and each["status"] == "True" for each in listed)


def _set(workload: Mapping[str, Any], kind: str, status: str, reason: str, message: str) -> None:
    listed = workload["status"]["conditions"]
    listed[:] = [each for each in listed if each["type"] != kind]
    at = "2030-01-31T12:00:00Z"
    listed.append({"type": kind, "status": status, "reason": reason, "message": message,
                   "lastTransitionTime": at})  # fmt: skip
