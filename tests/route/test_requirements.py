"""The packages of a route: missing, too old, newer than tested."""

import importlib.metadata

import pytest

from vllm_neuron import requirements
from vllm_neuron.errors import ConfigurationError


@pytest.fixture
def installed(monkeypatch):
    """Installed versions by name; a name that is not among them is not installed."""
    versions = {"torch": "2.13.0+cpu", "torch-mlir": "20261001", "jaxlib": "0.10.2", "vllm": "0.32"}
    texts = [
        "click>=8.1",
        "torch==2.13.0 ; extra == 'native'",
        "torch-mlir==20261001 ; extra == 'native'",
        "jaxlib>=0.10,<0.11 ; extra == 'native'",
        "vllm==0.32.0 ; extra == 'serve'",
    ]

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(requirements, "version", version)
    monkeypatch.setattr(requirements, "requires", lambda name: texts)
    return versions


def test_what_this_environment_has_is_right():
    assert requirements.check_packages("native") == []
    assert requirements.check_packages("serve") == []


def test_versions_in_range(installed):
    assert requirements.check_packages("native") == []
    assert requirements.check_packages("serve") == []


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        (
            "torch-mlir",
            None,
            "torch-mlir==20261001 is needed to serve by this route, and "
            "torch-mlir is not installed. Install it: pip install 'torch-mlir==20261001'.",
        ),
        (
            "torch-mlir",
            "20260101",
            "torch-mlir==20261001 is needed to serve by this route, and "
            "torch-mlir 20260101 is too old. Install it: pip install 'torch-mlir==20261001'.",
        ),
        (
            "jaxlib",
            "0.9.9",
            "jaxlib<0.11,>=0.10 is needed to serve by this route, and jaxlib "
            "0.9.9 is too old. Install it: pip install 'jaxlib<0.11,>=0.10'.",
        ),
    ],
)
def test_missing_or_too_old(installed, name, version, text):
    del installed[name]
    if version is not None:
        installed[name] = version
    with pytest.raises(ConfigurationError) as caught:
        requirements.check_packages("native")
    assert str(caught.value) == text
    assert (caught.value.name, caught.value.value) == (name, version)
    assert requirements.check_packages("serve") == []


@pytest.mark.parametrize(
    ("extra", "name", "version"),
    [("native", "jaxlib", "0.11.0"), ("native", "torch", "2.14.1"), ("serve", "vllm", "0.33.0")],
)
def test_newer_than_tested(installed, extra, name, version):
    installed[name] = version
    (warning,) = requirements.check_packages(extra)
    assert warning.startswith(f"{name} {version} is newer than what was tested: {name}")
