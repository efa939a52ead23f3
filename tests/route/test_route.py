"""Route, level and Precompile Cache decisions: every row of the user guide's tables."""

import logging
import pickle
from types import SimpleNamespace

import pytest

from vllm_neuron import route
from vllm_neuron.errors import ConfigurationError
from vllm_neuron.route import LogLine, Route

DIRECTORY = "/cache/neuron/precompile"
INFO, WARNING = logging.INFO, logging.WARNING

NATIVE_DEFAULT = "Using default optimization level O2 on the Neuron native route"
XLA_DEFAULT = "Defaulting optimization level to O1 on the XLA route"
DEPRECATED = (
    "The XLA route (VLLM_NEURON_BACKEND=vllm_neuron) is deprecated and a future release removes "
    "it. Unset VLLM_NEURON_BACKEND or set it to neuron_native for the native route."
)


def resolve(raw=None, **changes):
    arguments = {
        "explicit_level": None,
        "level_origin": "default",
        "cpu_mode": False,
        "torch_caching": None,
        "precompile_directory": DIRECTORY,
    }
    return route.resolve(raw, **(arguments | changes))


def invalid(value):
    return f"VLLM_NEURON_BACKEND='{value}' is not a valid route"


NOT_SET = "VLLM_NEURON_BACKEND is not set"
EMPTY = "VLLM_NEURON_BACKEND is empty"

# raw value, route, reason, Precompile Cache state
ROWS = [
    (None, Route.NATIVE, NOT_SET, f"off ({NOT_SET})"),
    ("", Route.NATIVE, EMPTY, f"off ({EMPTY})"),
    ("  ", Route.NATIVE, EMPTY, f"off ({EMPTY})"),
    ("\t\r\n", Route.NATIVE, EMPTY, f"off ({EMPTY})"),
    ("neuron_native", Route.NATIVE, "VLLM_NEURON_BACKEND=neuron_native", f"on ({DIRECTORY})"),
    ("neuron", Route.NATIVE, "VLLM_NEURON_BACKEND=neuron", f"on ({DIRECTORY})"),
    ("NEURON", Route.NATIVE, "VLLM_NEURON_BACKEND=neuron", f"on ({DIRECTORY})"),
    (" neuron_native ", Route.NATIVE, "VLLM_NEURON_BACKEND=neuron_native", f"on ({DIRECTORY})"),
    (" Neuron_Native ", Route.NATIVE, "VLLM_NEURON_BACKEND=neuron_native", f"on ({DIRECTORY})"),
    ("vllm_neuron", Route.XLA, "VLLM_NEURON_BACKEND=vllm_neuron", "off (XLA route)"),
    ("vllm_neuron\r", Route.XLA, "VLLM_NEURON_BACKEND=vllm_neuron", "off (XLA route)"),
    ("VLLM_Neuron", Route.XLA, "VLLM_NEURON_BACKEND=vllm_neuron", "off (XLA route)"),
    *(
        (value, Route.NATIVE, invalid(value), "off (VLLM_NEURON_BACKEND is not a valid route)")
        for value in ("neuron_nativ", "xla", " Neuron-Native", "a%sb", "x\ny", "'", "neuron native")
    ),
]


@pytest.mark.parametrize(("raw", "expected", "reason", "state"), ROWS)
def test_lines_of_each_value_without_a_level(raw, expected, reason, state):
    record = resolve(raw)
    assert (record.route, record.reason, record.raw_value) == (expected, reason, raw)
    assert (record.level, record.explicit) == ({"native": 2, "XLA": 1}[expected], False)
    lines = [LogLine(INFO, f"Neuron compilation route: {expected} ({reason})")]
    if "is not a valid route" in reason:
        lines.insert(
            0,
            LogLine(
                WARNING,
                f"VLLM_NEURON_BACKEND='{raw}' is not a valid route. The native route runs now.",
            ),
        )
    lines.append(LogLine(INFO, NATIVE_DEFAULT if expected == "native" else XLA_DEFAULT))
    if expected == "XLA":
        lines.append(LogLine(WARNING, DEPRECATED))
    lines.append(LogLine(INFO, f"Precompile Cache: {state}"))
    assert route.start_lines(record) == lines


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("origin", ["cli", "config file", "api"])
@pytest.mark.parametrize("raw", [None, "neuron_native", "vllm_neuron", "xla"])
def test_an_explicit_level_is_kept_on_each_route(raw, origin, level):
    record = resolve(raw, explicit_level=level, level_origin=origin)
    assert (record.level, record.level_origin, record.explicit) == (level, origin, True)
    texts = [line.text for line in route.start_lines(record)]
    assert texts.count(f"Explicit --optimization-level: keeping O{level}") == 1
    assert NATIVE_DEFAULT not in texts
    assert XLA_DEFAULT not in texts
    assert sum(text.startswith("Neuron compilation route: ") for text in texts) == 1


@pytest.mark.parametrize(
    ("raw", "changes", "state"),
    [
        ("neuron_native", {"cpu_mode": True}, "off (VLLM_NEURON_CPU_MODE=1)"),
        ("vllm_neuron", {"cpu_mode": True}, "off (VLLM_NEURON_CPU_MODE=1)"),
        (None, {"cpu_mode": True, "torch_caching": False}, "off (VLLM_NEURON_CPU_MODE=1)"),
        ("vllm_neuron", {"torch_caching": False}, "off (XLA route)"),
        (None, {"torch_caching": False}, f"off ({NOT_SET})"),
        (" ", {"torch_caching": False}, f"off ({EMPTY})"),
        ("xla", {"torch_caching": False}, "off (VLLM_NEURON_BACKEND is not a valid route)"),
        ("neuron_native", {"torch_caching": False}, "off (TORCH_CACHING_PRECOMPILE=0)"),
        ("neuron", {"torch_caching": False}, "off (TORCH_CACHING_PRECOMPILE=0)"),
        ("neuron", {"torch_caching": True}, f"on ({DIRECTORY})"),
    ],
)
def test_the_first_matching_row_decides_the_precompile_cache(raw, changes, state):
    record = resolve(raw, **changes)
    assert record.precompile_on is state.startswith("on")
    lines = route.start_lines(record)
    assert lines[-1] == LogLine(INFO, f"Precompile Cache: {state}")


@pytest.mark.parametrize(
    ("raw", "cpu_mode"),
    [(None, False), ("", False), ("vllm_neuron", False), ("xla", False), ("neuron", True)],
)
def test_torch_caching_precompile_does_not_turn_the_cache_on(raw, cpu_mode):
    record = resolve(raw, cpu_mode=cpu_mode, torch_caching=True)
    assert not record.precompile_on
    *_, state, warning = route.start_lines(record)
    assert state.text == f"Precompile Cache: off ({record.precompile_reason})"
    assert warning.level == WARNING
    assert warning.text.startswith(
        "TORCH_CACHING_PRECOMPILE=1 does not turn the Precompile Cache on"
    )
    assert f"({record.precompile_reason})" in warning.text


def test_a_level_needs_an_origin():
    with pytest.raises(ValueError, match="level 2 cannot come from 'default'"):
        resolve(explicit_level=2)
    with pytest.raises(ValueError, match="level None cannot come from 'cli'"):
        resolve(level_origin="cli")


def test_lines_are_written_as_they_stand(caplog):
    record = resolve("50%s\tx")
    with caplog.at_level(INFO, logger="vllm_neuron"):
        route.write_lines(route.start_lines(record))
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (line.level, line.text) for line in route.start_lines(record)
    ]
    assert "VLLM_NEURON_BACKEND='50%s\tx' is not a valid route." in caplog.text


def test_the_record_is_immutable_and_survives_pickling():
    record = resolve("neuron")
    with pytest.raises(AttributeError):
        record.level = 1
    assert pickle.loads(pickle.dumps(record)) == record


def test_a_configuration_without_a_record_is_refused():
    config = SimpleNamespace(device_config=SimpleNamespace())
    with pytest.raises(ConfigurationError, match="carries no Neuron route record") as caught:
        route.record_of(config)
    assert caught.value.name == "VLLM_NEURON_BACKEND"
    with pytest.raises(ConfigurationError):
        route.adopt(config)


def test_the_attached_start_is_the_one_of_the_process():
    start = route.StartRecord(resolve("neuron"), None, None, None)
    config = SimpleNamespace(device_config=SimpleNamespace())
    route.attach(config, start)
    assert route.start_of(config) is start
    assert route.record_of(config) is start.route
    assert route.current() is start
