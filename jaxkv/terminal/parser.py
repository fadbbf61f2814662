"""The parser of the command line, which imports the module of the chosen command alone."""

import argparse
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

from jaxkv_kernels.names import expected_one_of


class Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest choice for an unknown one, and whose commands are modules.

    A command is a module with a docstring, whose first line is its help text, `add_arguments(parser)` and
    `run(args) -> int`.
    """

    module = ""
    """The module of the command that this parser is for; empty for others."""

    def add_commands(self, metavar: str, modules: Mapping[str, str]) -> "argparse._SubParsersAction[Parser]":
        """Adds commands: the names of their modules by their own."""
        commands = self.add_subparsers(metavar=metavar, required=True, parser_class=Parser)
        for name, module in modules.items():
            summary = _summary(module)
            commands.add_parser(name, help=summary, description=summary).module = module
        return commands

    def parse_known_args(self, args=None, namespace=None):
        """As of any parser, but the module of the command is only imported now."""
        if self.module:
            command = import_module(self.module)
            command.add_arguments(self)
            self.set_defaults(run=command.run, prog=self.prog)
        return super().parse_known_args(args, namespace)

    def _check_value(self, action, value):
        if action.choices is not None and value not in action.choices:
            expected = expected_one_of(value, action.choices)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} ({expected})")


def _summary(module: str) -> str:
    """The first line of the docstring of a module, without importing or parsing it, which take long."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    _, docstring, _ = spec.loader.get_source(module).split('"""', 2)  # type: ignore[attr-defined]
    return docstring.splitlines()[0]
