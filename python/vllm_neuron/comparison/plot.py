"""Difference from eager against depth, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_neuron.errors import ConfigurationError

__all__ = ["SUFFIXES", "check_plot", "write_plot"]

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """See before the work whether a plot can be written.

    Raises:
        ConfigurationError: the suffix is none of `SUFFIXES`, or matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigurationError(
            f"--plot {path}: the suffix is {path.suffix or 'missing'}, expected "
            f"{' or '.join(SUFFIXES)}",
            name="--plot",
            value=str(path),
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"--plot needs matplotlib, which is not installed: pip install matplotlib, or leave "
            f"--plot out ({error})",
            name="--plot",
            value=str(path),
        ) from error


def write_plot(tree: Mapping[str, Any], path: Path) -> None:
    """Draw the relative differences of a report by depth, a line for each route and bucket."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = tree["places"]
    figure = Figure(figsize=(max(7.0, 2.0 + 0.25 * len(places)), 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    drawn: list[float] = [tree["tolerance"]]
    for item in tree["buckets"]:
        known = {layer["place"]: layer["relative"] for layer in item["layers"]}
        points = [
            (places.index(place), value)
            for place, value in known.items()
            # The axis has neither zero nor infinity.
            if not isinstance(value, str) and value > 0
        ]
        drawn += [value for _, value in points]
        axes.plot(
            [index for index, _ in points],
            [value for _, value in points],
            marker="o" if item["route"] == "native" else "s",
            markersize=4,
            linestyle="-" if item["route"] == "native" else ":",
            label=f"{item['route']}, {item['bucket']}",
        )
    axes.axhline(tree["tolerance"], color="black", linewidth=0.8, linestyle="--")
    axes.annotate("tolerance", (0, tree["tolerance"]), xytext=(2, 3), textcoords="offset points")
    axes.set_yscale("log")
    axes.set_ylim(min(drawn) / 3, max(drawn) * 3)
    axes.set_xticks(range(len(places)), places, rotation=90, fontsize=7)
    axes.set_xlabel("place, in the order of the model")
    axes.set_ylabel("largest relative difference from eager")
    axes.set_title(f"{Path(tree['model']).name}, {tree['dtype']}, {tree['runtime']}")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
