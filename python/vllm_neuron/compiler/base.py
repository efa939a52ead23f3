"""The interface of the compilers that turn a lowered module into a NEFF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from vllm_neuron.compiler.arguments import CompilerArguments, compiler_arguments

if TYPE_CHECKING:
    from vllm_neuron.lowering.module import LoweredModule

__all__ = ["Compiler", "CompilerArguments", "compiler_arguments"]


class Compiler(Protocol):
    """What turns a lowered module into the bytes of a NEFF.

    Attributes:
        name: the compiler for a person and for keys, e.g. `xla-cpu` or `neuronx-cc`.
        version: its full version.
        target: the device architecture that its NEFFs are for, e.g. `host` or `trn2`.
    """

    name: str
    version: str
    target: str

    def key_factors(self) -> Mapping[str, str]:
        """Return what enters compile keys besides module bytes and arguments.

        Name, version and target of the compiler are among it.
        """
        ...

    def stop(self) -> None:
        """End the compilations that are running, from any thread; they raise CompileError.

        No other is begun afterwards. What cannot be ended runs on to its end.
        """
        ...

    def compile(
        self,
        module: LoweredModule,
        *,
        bucket: str,
        arguments: tuple[str, ...],
        input_names: Sequence[str],
        output_names: Sequence[str],
    ) -> bytes:
        """Compile one module.

        Args:
            module: the lowered module with its input and output specifications and aliases.
            bucket: the name of the bucket, for messages.
            arguments: the merged compiler arguments (`CompilerArguments.arguments`).
            input_names: one name per module input, in order.
            output_names: one name per module output, in order.

        Returns:
            The NEFF.

        Raises:
            CompileError: the compiler refuses the module or fails.
        """
        ...
