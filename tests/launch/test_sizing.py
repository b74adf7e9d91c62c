"""A person's requests about a job's size hold wherever they fit."""

import pytest

from scalai.core.degrees import Degrees
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job import JobSpec
from scalai.launch.coordinator.sizing import Sizing

FOUR, TWO = (("a", 2), ("b", 2)), (("a", 2),)


@pytest.fixture
def sizing(tmp_path_factory: pytest.TempPathFactory) -> Sizing:
    config = tmp_path_factory.mktemp("sizing") / "elastic.toml"
    config.write_text('[degrees]\n4 = "tp2"\n2 = "tp1"\n[model]\nnum_attention_heads = 8\n')
    flags = ["--nnodes", "1:2", "--nproc-per-node", "2", "--elastic", str(config), "script.py"]
    return Sizing(JobSpec.read(parse_options(flags)))


def test_requested_degrees_hold_until_the_next_scale(sizing: Sizing) -> None:
    sizing.rescale(None, None, "tp4")
    first = sizing.assign()(FOUR, Degrees(2, 1, 2))
    again = sizing.assign()(FOUR, Degrees(4, 1, 1))
    assert first is not None and again is not None
    assert first.degrees == again.degrees == Degrees(4, 1, 1)
    sizing.rescale(None, None, None)
    back = sizing.assign()(FOUR, Degrees(4, 1, 1))
    assert back is not None
    assert back.degrees == Degrees(2, 1, 2)


def test_a_job_goes_on_where_requested_degrees_do_not_fit_any_more(sizing: Sizing) -> None:
    sizing.rescale(None, None, "tp4")
    assignment = sizing.assign()(TWO, Degrees(4, 1, 1))
    assert assignment is not None
    assert assignment.degrees == Degrees(1, 1, 2)


def test_a_request_that_does_not_fit_is_not_taken_for_another(sizing: Sizing) -> None:
    why: list[str] = []
    assert sizing.scaled(None, None, "tp4", why.append)(TWO, Degrees(1, 1, 2)) is None


def test_who_takes_over_goes_by_what_persons_asked_for_and_what_ran_out_of_memory(
    sizing: Sizing, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = tmp_path_factory.mktemp("sizing") / "elastic.toml"
    config.write_text("[model]\nnum_attention_heads = 8\n")
    flags = ["--nnodes", "1:2", "--nproc-per-node", "2", "--elastic", str(config), "script.py"]
    spec = JobSpec.read(parse_options(flags))
    before, after = Sizing(spec), Sizing(spec)
    first = before.assign()(FOUR, None)
    assert first is not None
    before.exclude(first)
    before.rescale(3, 2, None)
    after.take_over(before.request)
    assert after.request == before.request
    for hosts in (FOUR, TWO):
        found = after.assign()(hosts, None)
        assert found == before.assign()(hosts, None)
        assert found is None or found.degrees != first.degrees


def test_a_limit_of_hosts_leaves_the_later_ones_idle(sizing: Sizing) -> None:
    sizing.rescale(None, 1, None)
    assignment = sizing.assign()(FOUR, None)
    assert assignment is not None
    assert assignment.workers == (("a", 2), ("b", 0))
