"""The command `vllm-neuron`: a group whose commands are imported when they are used.

Nothing here or in the commands for files imports torch or vllm.
"""

from __future__ import annotations

from importlib import import_module

import click

from vllm_neuron import _core

__all__ = ["main"]

# Name of the command: where it is defined ("module:attribute"), and its line in `--help`, which
# is repeated here so that `--help` imports no command.
_COMMANDS = {
    "cache": ("vllm_neuron.cli.cache:cache", "Look at and after the compile caches."),
    "compare": (
        "vllm_neuron.cli.compare:compare",
        "Show where the routes differ from eager on a model.",
    ),
    "doctor": (
        "vllm_neuron.cli.doctor:doctor",
        "Report what this machine has for a Neuron device.",
    ),
    "xla-env": (
        "vllm_neuron.cli.xla_env:xla_env",
        "Make the interpreter of the XLA route's worker.",
    ),
    "neff": ("vllm_neuron.cli.neff:neff", "Show and validate NEFF files."),
}


class _LazyGroup(click.Group):
    """A group that imports a command only when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(_COMMANDS.items())])


@click.command(cls=_LazyGroup)
@click.version_option(_core.__version__, prog_name="vllm-neuron")
def main() -> None:
    """Tools for vLLM on AWS Trainium."""
