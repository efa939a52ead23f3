"""The packages that a route needs: whether they are installed, and recent enough.

The version ranges are those of this distribution's own extras, so there is one place for them.
Nothing is imported: a warm start loads no tracer and no lowering.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from vllm_neuron.errors import ConfigurationError

__all__ = ["DISTRIBUTION", "check_packages"]

DISTRIBUTION = "vllm-neuron-rs"


def check_packages(extra: str) -> list[str]:
    """Check the packages of an extra of this distribution.

    Args:
        extra: `native`, `xla` or `serve`.

    Returns:
        WARNING lines about packages that are newer than what was tested.

    Raises:
        ConfigurationError: a package is missing or too old; `name` is the package, `value` the
            version that is installed, or None.
    """
    warnings = []
    for text in requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        name, wanted = requirement.name, f"{requirement.name}{requirement.specifier}"
        remedy = f"Install it: pip install '{wanted}'."
        try:
            installed = version(name)
        except PackageNotFoundError:
            raise ConfigurationError(
                f"{wanted} is needed to serve by this route, and {name} is not installed. {remedy}",
                name=name,
                value=None,
            ) from None
        if requirement.specifier.contains(installed, prereleases=True):
            continue
        oldest = [Version(s.version) for s in requirement.specifier if s.operator in ("==", ">=")]
        if any(Version(installed) < bound for bound in oldest):
            raise ConfigurationError(
                f"{wanted} is needed to serve by this route, and {name} {installed} is too old. "
                f"{remedy}",
                name=name,
                value=installed,
            )
        warnings.append(f"{name} {installed} is newer than what was tested: {wanted}.")
    return warnings
