"""vLLM on AWS Trainium: what vLLM's plugin entry points call.

Importing this package imports neither torch nor vllm nor jax.
"""

from __future__ import annotations

__all__ = ["register", "register_general"]


def register() -> str | None:
    """Name the platform class, or decline (entry point `vllm.platform_plugins`).

    vLLM calls this while it is itself half imported, so nothing heavy may be imported here.

    Returns:
        The qualified name of the platform class, or None when no Neuron device is present and
        neither a host nor a CPU mode is asked for; vLLM then looks for another platform.
    """
    from vllm_neuron.device import platform_class_name

    return platform_class_name()


def register_general() -> None:
    """Install what must be in every vLLM process (entry point `vllm.general_plugins`).

    vLLM calls this in each of its processes, possibly more than once.
    """
    from vllm_neuron.device import is_selected

    if is_selected():
        from vllm_neuron.optimization import install_level_origin

        install_level_origin()
