"""Options of commands, beside the key=value settings: how they are read, and shown by --help."""

import argparse
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from octablox.errors import UserError

_WIDTH, _NAME_WIDTH = 100, 30


class Parser(argparse.ArgumentParser):
    """An argument parser that says one line where the user made a mistake. UserError."""

    def __init__(self, verb: str):
        self._verb = verb
        super().__init__(prog=f"octablox {verb}", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises the UserError."""
        raise UserError(f"{self._verb}: {message}; octablox {self._verb} --help")

    def help_text(self, usage: str, summary: str, example: str, after: Sequence[str]) -> str:
        """What `--help` prints: the options in a list, then the lines of `after`."""
        lines = [f"octablox {self._verb} {usage}", "", summary, "", f"  {example}", "", "options:"]
        return "\n".join([*lines, *self.option_lines(), "", *after])

    def option_lines(self) -> list[str]:
        """Each option with what it does."""
        named = (action for action in self._actions if action.option_strings)
        return [line for action in named for line in _lines_of(action)]


def _lines_of(action: argparse.Action) -> list[str]:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    text = (action.help or "") % {"default": action.default}
    if action.choices:
        text += f" ({' | '.join(map(str, action.choices))})"
    first = f"  {f'{action.option_strings[0]} {value}':{_NAME_WIDTH}}"
    if len(first) > _NAME_WIDTH + 2:
        return [first, *textwrap.wrap(text, _WIDTH, initial_indent=" " * (_NAME_WIDTH + 2))]
    return textwrap.wrap(
        f"{first}{text}",
        _WIDTH,
        subsequent_indent=" " * (_NAME_WIDTH + 2),
        drop_whitespace=True,
        break_on_hyphens=False,
    )
