"""The interface that leads to the coordinator."""

import pytest

from scalai.core.errors import UsageError
from scalai.launch.agent.network import address_towards, interface_environment, interface_of

pytestmark = pytest.mark.fault


def test_the_way_to_this_machine_is_the_loopback_interface() -> None:
    assert address_towards(("127.0.0.1", 29400)) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"


def test_what_the_user_has_named_stays() -> None:
    given = {"NCCL_SOCKET_IFNAME": "ib0"}
    assert interface_environment("127.0.0.1", given) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
    }


def test_nccl_is_told_the_whole_name_and_not_a_beginning_of_names() -> None:
    assert interface_environment("127.0.0.1", {})["NCCL_SOCKET_IFNAME"] == "=lo"


def test_an_address_of_no_interface_names_none() -> None:
    assert interface_environment("203.0.113.9", {}) == {}


def test_a_coordinator_that_cannot_be_found_is_named() -> None:
    with pytest.raises(UsageError, match=r"no way to the coordinator no-such-host\.invalid:1"):
        address_towards(("no-such-host.invalid", 1))
