"""What Megatron-LM trains in its own functional tests is taken, and what is offered for it is valid
for Megatron-LM too."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scalai.converters.megatron.arguments import derived_flags
from scalai.core.degrees.degrees import AXES, Degrees
from scalai.core.errors import RefusedError
from scalai.launch.commands.check_elastic import check_elastic, offered_degrees, worlds_of
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.config.script_facts import ScriptFacts, read_script
from support import megatron_lm_job
from support.functional_configurations import (
    RANKS,
    Configuration,
    faults_of,
    training_configurations,
)

CHECKOUT = megatron_lm_job.CHECKOUT or ""
MOST_REFUSED_ANYWAY = 0.05
"""Of a release's files those that Megatron-LM refuses: flags escaped for a shell, for one."""
LEAST_PART = 235 / 259
"""Of the training configurations of 0.20 (d98e8a64), those that are taken at least."""
LEAST = {193: 169}
"""The same in other releases, by how many there are (0.16.1)."""

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not Path(CHECKOUT, "tests", "functional_tests", "test_cases").is_dir() or not CHECKOUT,
        reason="MEGATRON_LM_PATH names no Megatron-LM checkout with its functional tests",
    ),
]


def spec_of(configuration: Configuration) -> JobSpec:
    """The configuration as a job on as many hosts of eight ranks as it needs, up to twice as
    many."""
    hosts = max(2, 2 * configuration.world_size // RANKS)
    flags = ["--nnodes", f"1:{hosts}", "--nproc-per-node", str(RANKS)]
    return JobSpec.read(
        parse_options(["--check-elastic", *flags, configuration.script, *configuration.flags])
    )


def offered(spec: JobSpec, facts: ScriptFacts) -> list[Degrees]:
    """Everything that is valid on any world of the job."""
    worlds = worlds_of(facts.policy, spec.max_hosts * RANKS)
    return sorted(offered_degrees(facts.limits, facts.policy, worlds), key=str)


def may_change(facts: ScriptFacts, degrees: Sequence[Degrees]) -> bool:
    """Whether an axis that does not stay has several sizes."""
    stays = {axis for axis, _, _ in facts.limits.fixed}
    return any(len({getattr(d, axis) for d in degrees}) > 1 for axis in AXES if axis not in stays)


def test_most_configurations_are_taken_and_what_is_offered_is_valid_for_megatron_too() -> None:
    configurations = list(training_configurations(Path(CHECKOUT)))
    refused: dict[str, str] = {}
    unchanging: list[str] = []
    cases: dict[tuple[str, ...], list[tuple[int, Sequence[str]]]] = {}
    names: dict[tuple[str, ...], str] = {}
    for configuration in configurations:
        spec = spec_of(configuration)
        try:
            report = str(check_elastic(spec.options, spec.config, RANKS, spec.deepspeed))
        except RefusedError as error:
            refused[configuration.name] = str(error)
            continue
        facts = read_script(spec.options, spec.config, spec.deepspeed)
        degrees = offered(spec, facts)
        if not may_change(facts, degrees):
            unchanging.append(configuration.name)
        assert ("may change: nothing" in report) != may_change(facts, degrees), configuration.name
        assert facts.arguments is not None
        names.setdefault(configuration.flags, configuration.name)
        cases[configuration.flags] = [
            (
                choice.world_size,
                [*configuration.flags, *derived_flags(facts.arguments, choice, None)[0]],
            )
            for choice in degrees
        ]
    every = [case for listed in cases.values() for case in listed]
    found = iter(faults_of(Path(CHECKOUT), every))
    wrong, refused_anyway = list[str](), list[str]()
    for flags, listed in cases.items():
        faults = [(world, next(found)) for world, _ in listed]
        if faults and all(
            fault for _, fault in faults
        ):  # what Megatron-LM itself refuses at any degrees
            refused_anyway.append(names[flags])
            continue
        wrong += [f"{names[flags]} on {n} ranks: {fault}" for n, fault in faults if fault]
    accepted = len(configurations) - len(refused) - len(unchanging)
    print(f"{accepted} of {len(configurations)} accepted, {len(every)} command lines checked")
    print("nothing can change:", *unchanging or ["none"])
    for name, why in refused.items():
        print(f"refused: {name}: {'; '.join(why.splitlines()[1:-1]).strip()}")
    print("no case accepted by Megatron-LM:", *refused_anyway or ["none"])
    assert not wrong, "\n".join(wrong[:20])
    assert len(refused_anyway) <= MOST_REFUSED_ANYWAY * len(configurations), refused_anyway
    least = LEAST.get(len(configurations), LEAST_PART * len(configurations))
    assert accepted >= least, f"{accepted} of {len(configurations)}"


def test_the_command_ends_with_0_or_3_and_one_message() -> None:
    configurations = {c.name: c for c in training_configurations(Path(CHECKOUT))}
    taken = next(c for c in configurations.values() if "--async-save" not in c.flags)
    for flags, code in ((taken.flags, 0), ((*taken.flags, "--use-torch-fsdp2"), 3)):
        command = [sys.executable, "-m", "scalai.launch.run", "--check-elastic"]
        command += ["--nproc-per-node", str(RANKS), taken.script, *flags]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": CHECKOUT},
        )  # fmt: skip
        assert ended.returncode == code, ended.stderr
        assert "Traceback" not in ended.stderr
        assert ("may change:" in ended.stdout) == (code == 0)
