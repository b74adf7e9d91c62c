"""The commands' part of docs/cli.md, made from the parsers:
``python tests/support/cli_page.py`` writes it behind the part by hand."""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path

from scalai.launch.cli import MODULES
from scalai.launch.config.flags import CONFIG_KEYS, build_parser

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
MARK = "<!-- From here on made by `python tests/support/cli_page.py`. -->\n"
GROUP = "elastic training"
"""Group of Scalai's flags in the parser of ``scalai-run``; the others are torchrun's."""


def page() -> str:
    """The whole page: its part by hand as it is, the commands as the parsers have them now."""
    by_hand = PAGE.read_text().partition(MARK)[0]
    return by_hand + MARK + "\n" + "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "## Flags of scalai-run\n"
    yield from _table(build_parser(), {GROUP}, CONFIG_KEYS)
    root = argparse.ArgumentParser(prog="scalai")
    commands = root.add_subparsers()
    for module in dict.fromkeys(MODULES.values()):
        importlib.import_module(f"scalai.launch.commands.{module}").add_parser(commands)
    for name in MODULES:
        yield from _command(f"scalai {name}", commands.choices[name])


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    actions = parser._actions
    inner = [a for a in actions if isinstance(a, argparse._SubParsersAction)]
    named = [_value(a, parser) for a in actions if not a.option_strings and a not in inner]
    yield f"\n## {name}\n"
    yield f"`{' '.join([name, '[flags]', *named] if not inner else [name, 'ACTION'])}`\n"
    yield " ".join(str(parser.description or "").split())
    if parser.epilog:
        yield "\n" + " ".join(parser.epilog.split())
    yield from _table(parser)
    for action in inner:
        for each, below in action.choices.items():
            yield from _command(f"{name} {each}", below)


def _table(
    parser: argparse.ArgumentParser,
    groups: set[str] | None = None,
    keys: dict[str, str] | None = None,
) -> Iterator[str]:
    shown = [
        action
        for group in parser._action_groups
        if groups is None or group.title in groups
        for action in group._group_actions
        if action.help
        and action.help != argparse.SUPPRESS
        and action.dest not in ("help", "version")
    ]
    if shown:
        yield f"\n| flag |{' key |' if keys else ''} meaning |\n|---|{'---|' if keys else ''}---|"
    for action in shown:
        spellings = [s for s in action.option_strings if "_" not in s] or [_value(action, parser)]
        takes = _value(action, parser) if action.option_strings and action.nargs != 0 else ""
        flag = ", ".join(f"`{s} {takes}`" if takes else f"`{s}`" for s in spellings)
        key = keys.get(action.dest, "") if keys else ""
        cell = (f" `{key}` |" if key else " |") if keys else ""
        yield f"| {flag.replace('|', _BAR)} |{cell} {_help(action, parser)} |"


_BAR = r"\|"


def _value(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """The help text with its values; of the home folder and the user nothing."""
    values = {**vars(action), "prog": parser.prog}
    return " ".join((str(action.help) % values).split()).replace("|", _BAR)


if __name__ == "__main__":
    PAGE.write_text(page())
