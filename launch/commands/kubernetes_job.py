"""The number of pods of an Indexed Job of Kubernetes: ``scalai scale --kubernetes``."""

from collections.abc import Mapping
from typing import Any

from scalai.core.errors import PeerError, RefusedError, UsageError
from scalai.launch.commands.kueue import GATE, QUEUE_LABEL
from scalai.launch.coordinator.api_servers import KubernetesApi

FLAG = "--kubernetes"
ROLE = "apiGroups: [batch], resources: [jobs], verbs: [get, patch]"
"""Rule of the Role for this command."""
ENDED = {"Complete", "Failed", "SuccessCriteriaMet", "FailureTarget"}
"""Conditions of a Job whose size is fixed."""
TRANSIENT = 408, 409, 429
"""Statuses 4xx of a call that may be tried again."""


def scale_job(name: str, pods: int, *, is_dry: bool) -> str:
    """Change ``parallelism`` and ``completions`` of a Job together: of an Indexed Job they change
    in no other way. Returns the change as a sentence.

    Args:
        name: The Job, in this pod's namespace.
        pods: New number. The highest indexes go first.
        is_dry: The API server checks and changes nothing.

    Raises:
        UsageError: No pod, or no pods.
        RefusedError: There is no such Job, no access, or it cannot have this size.
        PeerError: No API server, or it has failed.
    """
    if pods < 1:
        raise UsageError(
            f"{FLAG} {name}: {pods} pods would complete the Job. To stop it and keep it: "
            f'kubectl patch job {name} -p \'{{"spec": {{"suspend": true}}}}\''
        )
    api = KubernetesApi.of_pod(FLAG)
    about = f"Job {api.namespace}/{name}"

    def ask(method: str, content: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        status, found = api.ask(
            about, method, "batch/v1", "jobs", name, content, is_dry=is_dry and content is not None
        )
        if status != 200:
            is_refused = 400 <= status < 500 and status not in TRANSIENT
            raise (RefusedError if is_refused else PeerError)(_problem(about, status, found))
        return found

    try:
        job = ask("GET")
        before = _size(about, job)
        _check_queue(about, job)
        size = {"parallelism": pods, "completions": pods}
        after = _size(about, ask("PATCH", {"spec": size}))
    except (KeyError, TypeError, AttributeError) as error:
        raise PeerError(f"{about} cannot be read: {error!r}") from error
    return f"{about}: {before} -> {after} pods"


def _size(about: str, job: Mapping[str, Any]) -> int:
    """Pods of a Job. Raises ``RefusedError`` if the number is fixed."""
    spec, conditions = job["spec"], job.get("status", {}).get("conditions") or []
    ended = {each["type"] for each in conditions if each["status"] == "True"} & ENDED
    if ended:
        raise RefusedError(f"{about} has ended ({', '.join(sorted(ended))}). Create it anew.")
    pods, completions = spec.get("parallelism", 1), spec.get("completions")
    if spec.get("completionMode") != "Indexed" or completions != pods:
        raise RefusedError(
            f"{about} has completionMode {spec.get('completionMode', 'NonIndexed')}, parallelism "
            f"{pods} and completions {completions}: only an Indexed Job with both alike changes "
            "its size (examples/kubernetes/)."
        )
    return int(pods)


def _check_queue(about: str, job: Mapping[str, Any]) -> None:
    """Raises ``RefusedError``: Kueue would stop the running Job at a change of its size."""
    queue = job["metadata"].get("labels", {}).get(QUEUE_LABEL)
    gates = job["spec"]["template"]["spec"].get("schedulingGates", [])
    is_elastic = GATE in [gate["name"] for gate in gates]
    if queue is not None and not is_elastic and not job["spec"].get("suspend", False):
        raise RefusedError(
            f"{about} is in Kueue's queue {queue}, and its pods have no scheduling gate {GATE}: "
            f'Kueue would stop it at a change. Create it with the annotation {GATE}: "true", '
            "where Kueue's feature gate ElasticJobsViaWorkloadSlices is on."
        )


def _problem(about: str, status: int, found: Mapping[str, Any]) -> str:
    why = f"{about}: the API server answers {status} {found.get('message', '')}".rstrip()
    if status == 404:
        return f"{why}. Name a Job of this pod's namespace."
    if status in (401, 403):
        return f"{why}. The pod's service account needs a Role with {ROLE}."
    return why
