"""Kueue's quota for Indexed Jobs that change their size: pods that a job has and can have, and why
a size waits.

Kueue keeps an elastic Job's admission in Workloads: one with the quota that is reserved, and a
newer one, a slice, where it is to grow. Read of them: the pods with quota, their requests and
flavors, and the reason of a slice that waits. The ClusterQueue has the quota, and all that is
reserved of it.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from scalai.core.errors import PeerError
from scalai.launch.coordinator.api_servers import KubernetesApi

API = "kueue.x-k8s.io/v1beta2"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
UID_LABEL = "kueue.x-k8s.io/job-uid"
GATE = "kueue.x-k8s.io/elastic-job"
"""Annotation of a Job that changes its size, and the scheduling gate that Kueue gives its pods."""
ROLES = "a Role to list workloads and get localqueues, and a ClusterRole to get clusterqueues"
UNITS = dict(zip(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), range(-3, 7), strict=True))

PAGE, PAGES = 25, 40
"""Workloads of a page, and pages of a job: replaced slices stay until the Job is deleted."""

Json = Mapping[str, Any]
Lane = tuple[str, ...]
"""Queue and flavors: jobs with the same ones share what is free."""


@dataclass(frozen=True, slots=True)
class Share:
    """A job in its queue.

    Attributes:
        pods: Pods whose quota is reserved.
        more: Further pods that the free quota holds; None: the queue has no limit of its own.
        waits: Why its present size has no quota yet; empty: it has.
    """

    lane: Lane
    pods: int
    more: int | None
    waits: str = ""


def pods_by_lane(shares: Iterable[Share]) -> Mapping[Lane, int | None]:
    """Pods that the jobs of each lane can have together; None: no limit."""
    lanes: dict[Lane, list[Share]] = {}
    for share in shares:
        lanes.setdefault(share.lane, []).append(share)
    found: dict[Lane, int | None] = {}
    for lane, members in lanes.items():
        more = [share.more for share in members if share.more is not None]
        held = sum(share.pods for share in members)
        found[lane] = max(0, held + min(more)) if len(more) == len(members) else None
    return found


def read_shares(api: KubernetesApi, names: Sequence[str]) -> Mapping[str, Share | None]:
    """The shares of Jobs of the pod's namespace; None: it is in no queue. Jobs that do not exist
    are left out.

    Raises:
        PeerError: No API server, no access, or an answer in another form.
    """
    seen: dict[tuple[str, str], Json] = {}

    def once(kind: str, name: str) -> Json:
        if (kind, name) not in seen:
            where = {"is_of_cluster": True} if kind == "clusterqueues" else {}
            seen[kind, name] = _asked(api, API, kind, name, **where)
        return seen[kind, name]

    found: dict[str, Share | None] = {}
    for name in names:
        job = _asked(api, "batch/v1", "jobs", name, may_lack=True)
        if not job:
            continue
        try:
            queue = job["metadata"].get("labels", {}).get(QUEUE_LABEL)
            if queue is None:
                found[name] = None
                continue
            workloads = _workloads(api, job["metadata"]["uid"])
            local = once("localqueues", queue)["spec"]
            cluster = once("clusterqueues", local["clusterQueue"])
            is_held = "None" != local.get("stopPolicy", "None")
            found[name] = share_of(workloads, cluster, is_held=is_held)
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise PeerError(f"Kueue's objects of Job {name} cannot be read: {error!r}") from error
    return found


def share_of(workloads: Sequence[Json], queue: Json, *, is_held: bool = False) -> Share:
    """A job's share, by its Workloads and its ClusterQueue.

    Args:
        workloads: Those that are not finished.
        is_held: The LocalQueue admits nothing now.
    """
    open_ones = sorted(workloads, key=lambda each: str(each["metadata"]["creationTimestamp"]))
    holders = [
        each for each in open_ones if _is(each, "QuotaReserved") and not _is(each, "Evicted")
    ]
    is_held = is_held or queue["spec"].get("stopPolicy", "None") != "None"
    pending = [each for each in open_ones if not _is(each, "QuotaReserved")]
    free, newest = _free(queue), next(reversed(pending or open_ones), None)
    waits = "" if newest is None else _waits(newest)
    if holders:
        (admitted, *_) = holders[-1]["status"]["admission"]["podSetAssignments"]
        wanted = int(holders[-1]["spec"]["podSets"][0]["count"])
        count = int(admitted.get("count", wanted))
        pods, flavors = min(count, wanted), dict(admitted["flavors"])
        each = _each(admitted["resourceUsage"], count)
    else:
        pods, each = 0, _requests(newest)
        flavors = _roomiest(queue, each, free)
    rooms = [free.get((flavors.get(name, ""), name), Fraction(0)) for name in each]
    limits = [math.floor(room / one) for room, one in zip(rooms, each.values(), strict=True)
              if room is not None]  # fmt: skip
    more = min(limits) if limits else None
    if is_held or not each:  # nothing is admitted now, or its requests are not counted yet
        more = min(0, more or 0)
    lane = (str(queue["metadata"]["name"]), *sorted(set(flavors.values())))
    return Share(lane, pods, more, waits)


def _asked(
    api: KubernetesApi, group: str, kind: str, name: str, *, may_lack: bool = False, **how: Any
) -> Json:
    about = f"{kind} {name}".rstrip()
    status, found = api.ask(about, "GET", group, kind, name, **how)
    if status == 404 and may_lack:
        return {}
    if status != 200:
        text = f"{about}: the API server answers {status} {found.get('message', '')}".rstrip()
        need = f" The pod's service account needs {ROLES} (examples/kubernetes/autoscaler)."
        raise PeerError(f"{text}.{need * (status in (401, 403))}")
    return found


def _workloads(api: KubernetesApi, uid: str) -> list[Json]:
    query, found = {"labelSelector": f"{UID_LABEL}={uid}", "limit": str(PAGE)}, list[Json]()
    for _ in range(PAGES):
        page = _asked(api, API, "workloads", "", query=query)
        found += [each for each in page["items"] if not _is(each, "Finished")]
        if not (token := page["metadata"].get("continue")):
            return found
        query["continue"] = token
    raise PeerError(
        f"a Job has more than {PAGE * PAGES} Workloads: delete those that are finished."
    )


def _condition(workload: Json, kind: str) -> Json | None:
    listed = workload.get("status", {}).get("conditions", [])
    return next((each for each in listed if each["type"] == kind), None)


def _is(workload: Json, kind: str) -> bool:
    found = _condition(workload, kind)
    return found is not None and found["status"] == "True"


def _waits(workload: Json) -> str:
    for kind in ("QuotaReserved", "Admitted"):
        if not _is(workload, kind):
            found = _condition(workload, kind)
            text = "" if found is None else str(found.get("message", ""))
            return " ".join(text.split())[:200] or "it has not been considered yet"
    return ""


def _requests(workload: Json | None) -> Mapping[str, Fraction]:
    """Requests of a pod that has no quota yet, as Kueue has counted them."""
    if workload is None:
        return {}
    (total, *_) = workload.get("status", {}).get("resourceRequests") or [{"resources": {}}]
    return _each(total["resources"], int(workload["spec"]["podSets"][0]["count"]))


def _each(total: Mapping[str, str], count: int) -> Mapping[str, Fraction]:
    """Resources of one of so many pods."""
    found = {name: quantity(text) / count for name, text in total.items()}
    return {name: one for name, one in found.items() if one > 0}


def _free(queue: Json) -> Mapping[tuple[str, str], Fraction | None]:
    """Free quota by flavor and resource; None: as much as the cohort lends."""
    reserved = {
        (flavor["name"], each["name"]): quantity(each.get("total", "0"))
        for flavor in queue.get("status", {}).get("flavorsReservation", [])
        for each in flavor["resources"]
    }
    found: dict[tuple[str, str], Fraction | None] = {}
    for group in queue["spec"].get("resourceGroups", []):
        for flavor in group["flavors"]:
            for each in flavor["resources"]:
                key, borrowed = (flavor["name"], each["name"]), each.get("borrowingLimit", "0")
                if queue["spec"].get("cohortName") and "borrowingLimit" not in each:
                    found[key] = None
                    continue
                most = quantity(each["nominalQuota"]) + quantity(borrowed)
                found[key] = most - reserved.get(key, 0)
    return found


def _roomiest(
    queue: Json, each: Mapping[str, Fraction], free: Mapping[tuple[str, str], Fraction | None]
) -> dict[str, str]:
    """By resource, the flavor with room for the most pods."""
    found = dict[str, str]()
    for group in queue["spec"].get("resourceGroups", []):
        names = [name for name in group["coveredResources"] if name in each]

        def room(flavor: str, names: Sequence[str] = names) -> float:
            rooms = [(free.get((flavor, name), Fraction(0)), each[name]) for name in names]
            return min(
                (math.inf if of is None else float(of / one) for of, one in rooms), default=0
            )

        best = max((flavor["name"] for flavor in group["flavors"]), key=room, default="")
        found |= dict.fromkeys(names, best)
    return found


def quantity(text: str | float) -> Fraction:
    """A quantity of Kubernetes, such as 100m, 8, 1e3 or 36Gi. Raises ``ValueError``."""
    found = re.fullmatch(r"([+-]?[\d.]+)(?:[eE]([+-]?\d{1,3})|([numkMGTPE]?)(i?))", str(text))
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    number, power = Fraction(found[1]), UNITS[found[3] or ""]
    if found[2]:
        return number * Fraction(10) ** int(found[2])
    return number * Fraction(1024 if found[4] else 1000) ** power
