"""What a worker says as its script ends."""

from collections.abc import Iterator
from typing import Any

import pytest

from scalai.core.job.endings import RUN_AGAIN, WRONG_RESULT, kind_of
from scalai.patches import worker
from support.needed import need

need("megatron.core", "pip install '.[megatron]'")


@pytest.fixture
def machine() -> Iterator[Any]:
    from megatron.core import rerun_state_machine as module

    module.initialize_rerun_state_machine(mode=module.RerunMode.VALIDATE_RESULTS)
    yield module.get_rerun_state_machine()
    module.destroy_rerun_state_machine()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("state", "is_own", "code", "says", "kind"),
    [
        ("WILL_RERUN_FROM_CHECKPOINT", True, 16, RUN_AGAIN, "a step to be run again"),
        ("RERUNNING_AGAIN_FROM_CHECKPOINT", False, 16, RUN_AGAIN, "a step to be run again"),
        ("RERUNNING_IN_PLACE", True, 17, WRONG_RESULT, "a wrong result"),
        ("RERUNNING_IN_PLACE", False, 17, "", "the script left with 17"),
        ("RERUNNING_FROM_CHECKPOINT", True, 17, "", "the script left with 17"),
    ],
    ids=["asks to run again", "asks once more", "this rank is at fault", "another rank is",
         "the other device was, or none"],
)  # fmt: skip
def test_the_codes_of_megatrons_rerun_machine_are_told_apart(
    machine: Any, state: str, is_own: bool, code: int, says: str, kind: str
) -> None:
    machine.state = type(machine.state)[state]
    machine.rerun_requested = is_own
    *_, found = machine.should_checkpoint_and_exit()
    told = worker._of_rerun_machine(found)
    assert found == code and told == (f": {says}" if says else "")
    assert kind_of(f"rank 3: the script left with {code}{told}") == kind


def test_the_same_codes_of_another_script_mean_nothing() -> None:
    assert [worker._of_rerun_machine(code) for code in (16, 17)] == ["", ""]
