"""Rules of an Indexed Job of Kubernetes for its pods, as documented for ``batch/v1``: the fate of a
pod by the Job's manifest, and the Job of a sequence of pods."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Manifest = Mapping[str, Any]
Fate = Literal["job complete", "index complete", "replaced", "counted, replaced", "job failed"]

DISRUPTION = "DisruptionTarget"
"""Condition of a pod that is evicted, preempted, or has lost its node."""


def fate_of(
    job: Manifest, container: str, code: int, conditions: frozenset[str] = frozenset()
) -> Fate:
    """What becomes of a pod, and with it of the Job.

    Args:
        job: The Job's manifest.
        container: The pod's container.
        code: Its exit code; 128 + the signal for a killed one.
        conditions: Conditions of the pod that are true.
    """
    if code == 0:  # the pod's phase is Succeeded: the policy is for failed ones
        counts = [rule.get("succeededCount") for rule in _rules(job, "successPolicy")]
        return "job complete" if 1 in counts else "index complete"
    for rule in _rules(job, "podFailurePolicy"):
        if _matches(rule, container, code, conditions):
            fates: dict[str, Fate] = {
                "Ignore": "replaced", "Count": "counted, replaced", "FailJob": "job failed",
            }  # fmt: skip
            return fates[rule["action"]]
    return "counted, replaced"


def _rules(job: Manifest, policy: str) -> list[Manifest]:
    found: list[Manifest] = job["spec"].get(policy, {}).get("rules", [])
    return found


def _matches(rule: Manifest, container: str, code: int, conditions: frozenset[str]) -> bool:
    """Whether a rule is for this end of a pod; it has one of two requirements."""
    codes, wanted = rule.get("onExitCodes"), rule.get("onPodConditions", [])
    if codes is None:
        return any(each["type"] in conditions for each in wanted)
    assert not wanted, "a rule has either exit codes or conditions"
    is_in = code in codes["values"]
    return codes.get("containerName") in (None, container) and is_in is (codes["operator"] == "In")


@dataclass
class JobState:
    """An Indexed Job: which indexes want a pod.

    Attributes:
        job: Its manifest, of which the size changes.
        complete: Indexes that have completed.
        failed: Number of counted failures.
        result: Its end; "": it runs.
    """

    job: Manifest
    complete: set[int] = field(default_factory=set)
    failed: int = 0
    result: Literal["", "Complete", "Failed"] = ""

    def wanted(self) -> list[int]:
        """Indexes with a pod. A scale-down takes the highest ones away."""
        if self.result:
            return []
        return [at for at in range(self.job["spec"]["parallelism"]) if at not in self.complete]

    def end(self, index: int, fate: Fate) -> None:
        """A pod has ended."""
        if self.result:
            return
        if fate == "index complete":
            self.complete.add(index)
        self.failed += fate == "counted, replaced"
        if fate == "job failed" or self.failed > self.job["spec"]["backoffLimit"]:
            self.result = "Failed"
        elif fate == "job complete" or len(self.complete) >= self.job["spec"]["completions"]:
            self.result = "Complete"
