"""What a comparison found: as JSON, as tables, and in a sentence for each route."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_neuron import _core

__all__ = ["FORMAT", "Report"]

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison as plain data; docs/how-to-compare-routes.md defines `tree`.

    Attributes:
        tree: the content of the JSON file.
    """

    tree: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        session: Any,
        *,
        model: str,
        dtype: str,
        tolerance: float,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        left_out: Mapping[str, str],
        routes: Sequence[str],
    ) -> Report:
        """The report of a `ComparisonSession` that has run."""
        return cls(
            {
                "format": FORMAT,
                "vllm_neuron": _core.__version__,
                "model": model,
                "dtype": dtype,
                "runtime": "host emulator",
                "reference": "eager",
                "tolerance": tolerance,
                "prompt_tokens": [len(prompt) for prompt in prompts],
                "generated_tokens": tokens,
                "routes": {
                    name: {
                        "agrees": name not in session.partings,
                        "parts": _parting(session.partings.get(name)),
                    }
                    for name in routes
                },
                "left_out": dict(left_out),
                "places": list(session.places),
                "buckets": [_bucket(result) for result in session.results.values()],
            }
        )

    @property
    def agrees(self) -> bool:
        """Whether every route that was compared agrees with eager."""
        return all(route["agrees"] for route in self.tree["routes"].values())

    def print(self, console: Console) -> None:
        """Write tables and conclusions."""
        tree = self.tree
        buckets = list(dict.fromkeys(item["bucket"] for item in tree["buckets"]))

        def say(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        say(f"{tree['model']}, {tree['dtype']}: routes against eager, by bucket")
        console.print(self._summary())
        for bucket in buckets:
            say(f"{bucket}: largest difference from eager, by depth")
            console.print(self._layers(bucket))
        for line in self.conclusions():
            say(line)

    def conclusions(self) -> Iterator[str]:
        """A sentence or two for each route."""
        tree = self.tree
        for name, reason in tree["left_out"].items():
            yield f"{name} was left out: {reason}"
        for name, route in tree["routes"].items():
            parts = route["parts"]
            if parts is None:
                yield f"{name} agrees with eager (tolerance {tree['tolerance']:g}, relative)."
                continue
            prompts = ", ".join(map(str, parts["prompts"]))
            yield (
                f"{name} parts from eager first at {parts['place']} in {parts['bucket']} (prompt "
                f"{prompts}): absolute {_number(parts['absolute'])}, relative "
                f"{_number(parts['relative'])}, tolerance {tree['tolerance']:g}."
            )
            operator = parts["operator"]
            if operator is None:
                yield f"  No operator is named: {parts['note']}."
                continue
            yield (
                f"  Operator {operator['operator']} of {operator['module'] or 'the step'}: by "
                f"itself absolute {_number(operator['absolute'])}, relative "
                f"{_number(operator['relative'])}."
            )
            yield f"  Line {operator['source'] or 'not known'}"

    def _summary(self) -> Table:
        tree = self.tree
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("bucket", "route"):
            table.add_column(name, no_wrap=True)
        for name in ("logits", "relative", "KV rel.", "top-1", "KL mean", "KL max"):
            table.add_column(name, justify="right", no_wrap=True)
        for item in tree["buckets"]:
            top, divergence = item["top_1"], item["kl"]
            table.add_row(
                item["bucket"],
                item["route"],
                _number(item["logits"]["absolute"]),
                self._marked(item["logits"]["relative"]),
                self._marked(item["kv_caches"]["relative"]),
                f"{top['agreeing']}/{top['compared']}",
                _number(divergence["mean"]),
                _number(divergence["largest"]),
            )
        return table

    def _layers(self, bucket: str) -> Table:
        items = [item for item in self.tree["buckets"] if item["bucket"] == bucket]
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("place", no_wrap=True)
        for item in items:
            table.add_column(item["route"], justify="right")
            table.add_column("relative", justify="right")
        found = [{layer["place"]: layer for layer in item["layers"]} for item in items]
        for place in self.tree["places"]:
            if not any(place in layers for layers in found):
                continue
            cells = []
            for layers in found:
                layer = layers[place]
                cells += [_number(layer["absolute"]), self._marked(layer["relative"])]
            table.add_row(place, *cells)
        return table

    def _marked(self, relative: float | str) -> str:
        text = _number(relative)
        if isinstance(relative, str) or relative > self.tree["tolerance"]:
            return f"[bold red]{text}![/]"
        return text


def _parting(parting: Any) -> dict[str, Any] | None:
    if parting is None:
        return None
    operator = parting.operator
    return {
        "bucket": parting.bucket,
        "prompts": list(parting.prompts),
        "place": parting.place,
        **_plain(parting.difference),
        "operator": operator
        and {
            "operator": operator.operator,
            "module": operator.module,
            "source": operator.source,
            **_plain(operator.difference),
        },
        "note": parting.note,
    }


def _bucket(result: Any) -> dict[str, Any]:
    tokens = result.next_tokens
    spread = tokens.divergences
    return {
        "bucket": result.bucket,
        "route": result.route,
        "calls": result.calls,
        "logits": _plain(result.logits),
        "kv_caches": {
            "absolute": _finite(max(d.absolute for d in result.kv_caches.values())),
            "relative": _finite(max(d.relative for d in result.kv_caches.values())),
        },
        "layers": [{"place": place, **_plain(here)} for place, here in result.layers.items()],
        "top_1": {"agreeing": tokens.agreeing, "compared": tokens.compared},
        "kl": {
            "mean": _finite(sum(spread) / len(spread)) if spread else 0.0,
            "largest": _finite(max(spread, default=0.0)),
        },
    }


def _plain(difference: Any) -> dict[str, float | str]:
    return {
        "absolute": _finite(difference.absolute),
        "relative": _finite(difference.relative),
    }


def _finite(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else "inf"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1e}" if value else "0"
