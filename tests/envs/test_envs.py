"""Parsing of the environment: types, ranges, old names, unknown names, cache key classes."""

import os
import pickle
import re
from pathlib import Path

import pytest

import vllm_neuron
from vllm_neuron import envs
from vllm_neuron.envs import Effect, KeyClass, read_settings
from vllm_neuron.errors import ConfigurationError

BOOLEAN = "VLLM_NEURON_CPU_MODE"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, True) for text in ("1", "true", "TRUE", "yes", "YES", "on", "On", " 1 ")),
        *((text, False) for text in ("0", "false", "no", "off", "OFF", "", "  ")),
    ],
)
def test_booleans(text, value):
    assert read_settings({BOOLEAN: text})[BOOLEAN] is value


@pytest.mark.parametrize("text", ["2", "maybe", "10", "-1", "y"])
def test_a_word_that_is_no_boolean_is_an_error(text):
    with pytest.raises(ConfigurationError) as caught:
        read_settings({BOOLEAN: text})
    assert str(caught.value) == (
        f"{BOOLEAN}='{text}' is not valid: expected 0, 1, true, false, yes, no, on or off."
    )
    assert (caught.value.name, caught.value.value) == (BOOLEAN, text)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "", 600),
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "1800", 1800),
        ("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "", None),
        ("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "1", 1),
        ("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "1", 1.0),
        ("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "0.5", 0.5),
        ("VLLM_NEURON_DEVICE", "", "auto"),
        ("VLLM_NEURON_DEVICE", " host ", "host"),
        ("TORCH_CACHING_PRECOMPILE", "", None),
        ("TORCH_CACHING_PRECOMPILE", "0", False),
        ("NEURON_CC_FLAGS", "--x=1", "--x=1"),
        ("VLLM_NEURON_LOG_LEVEL", "", None),
        ("VLLM_NEURON_LOG_LEVEL", "debug", "DEBUG"),
        # OpenMP's own syntax, and OpenMP's business.
        ("OMP_NUM_THREADS", "4,2", "4,2"),
        ("NEURON_COMPILED_ARTIFACTS", "~/a", Path("~/a").expanduser()),
        ("VLLM_NEURON_BACKEND", "", ""),
        ("VLLM_NEURON_BACKEND", " Neuron ", " Neuron "),
    ],
)
def test_values(name, text, value):
    assert read_settings({name: text})[name] == value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "0", "an integer above 0"),
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "-5", "an integer above 0"),
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "1.5", "an integer above 0"),
        ("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "0", "an integer above 0"),
        ("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "abc", "an integer above 0"),
        ("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "0", "a number above 0 and at most 1"),
        ("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "1.01", "a number above 0 and at most 1"),
        ("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "nan", "a number above 0 and at most 1"),
        ("VLLM_NEURON_DEVICE", "x", "auto, neuron or host"),
        ("VLLM_NEURON_DEVICE", "HOST", "auto, neuron or host"),
        ("NEURON_LOGICAL_NC_CONFIG", "3", "1 or 2"),
        ("VLLM_NEURON_LOG_LEVEL", "loud", "DEBUG, INFO, WARNING, ERROR or CRITICAL"),
    ],
)
def test_values_out_of_range_name_variable_and_value(name, text, expected):
    with pytest.raises(ConfigurationError) as caught:
        read_settings({name: text})
    assert str(caught.value) == f"{name}='{text}' is not valid: expected {expected}."
    assert (caught.value.name, caught.value.value) == (name, text)


def test_no_cache_and_no_compiling_name_both():
    both = {"NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1", "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}
    with pytest.raises(ValueError) as caught:
        read_settings(both)
    assert all(name in str(caught.value) for name in both)


OLD, NEW = "VLLM_NEURON_COMPILATION_TIMEOUT", "NEURON_LIBTORCH_COMPILATION_TIMEOUT"


@pytest.mark.parametrize(
    "suffix",
    [
        "REMOTE_CACHE",
        "DISABLE_COMPILE_CACHE",
        "COMPILATION_TIMEOUT",
        "PARALLEL_COMPILE_WORKERS",
        "DISABLE_GRAPH_CAPTURE_BACKEND",
        "ASSERT_CACHE_HIT",
    ],
)
def test_each_old_name_is_an_alias(suffix):
    old, new = f"VLLM_NEURON_{suffix}", f"NEURON_LIBTORCH_{suffix}"
    settings = read_settings({old: "1"})
    assert settings[new] == read_settings({new: "1"})[new]
    assert f"{old} is the old name of {new}; please set {new}." in settings.notices


def test_an_error_in_an_old_name_names_the_old_name():
    with pytest.raises(ConfigurationError, match=f"^{OLD}='x' is not valid"):
        read_settings({OLD: "x"})


def test_the_new_name_wins_over_the_old_one():
    settings = read_settings({OLD: "7", NEW: "8"})
    assert settings[NEW] == 8
    assert settings.notices[0] == (
        f"{OLD}=7 is ignored: it is the old name of {NEW}, which is set to 8, and the new name "
        "wins."
    )
    same = read_settings({OLD: "8", NEW: "8"})
    assert same[NEW] == 8
    assert same.notices[0] == f"{OLD} is the old name of {NEW}, which is set too; unset it."


SAMPLES = {
    "size": ("20G",),
    "bool": ("1", "0"),
    "int": ("3",),
    "float": ("0.5",),
    "path": ("/x",),
    "str": ("x",),
}
SAMPLES |= {"log level": ("DEBUG",), "size": ("20G",)}


@pytest.mark.parametrize("row", envs.VARIABLES.values(), ids=lambda row: row.name)
def test_every_variable_has_an_effect_or_a_warning(row):
    samples = row.choices or SAMPLES[row.kind]
    notices = set()
    for text in samples:
        notices.update(read_settings({row.name: text}).notices)
    if row.effect in (Effect.LATER, Effect.NONE):
        assert any(n.startswith(f"{row.name}=") and "has no effect" in n for n in notices)
    else:
        assert not any("has no effect" in notice for notice in notices)


def test_variables_of_others_are_not_parsed():
    kinds = {row.kind for row in envs.VARIABLES.values() if row.effect is Effect.FOREIGN}
    assert kinds == {"str"}


def _documented(row):
    """The row of a variable in docs/reference-configuration.md."""
    kind = ", ".join(f"`{choice}`" for choice in row.choices) or row.kind
    default = "unset" if row.default is None else f"`{row.default}`"
    if row.kind == "bool" and row.default is not None:
        default = f"`{int(row.default)}`"
    meaning = row.meaning + (f"; {row.instead}" if row.instead else "")
    return (
        f"| `{row.name}` | {kind} | {default} | {meaning} | {row.effect.value} | {row.key.value} |"
    )


def test_the_reference_documents_every_variable():
    text = (Path(__file__).parents[2] / "docs/reference-configuration.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith(("| `VLLM_", "| `N", "| `T"))]
    rows = [line for line in lines if line.count("|") == 7]
    assert sorted(rows) == sorted(
        _documented(row) for row in envs.VARIABLES.values() if row.effect is not Effect.FOREIGN
    )
    for row in envs.VARIABLES.values():
        assert f"`{row.name}`" in text
        assert all(f"`{alias}`" in text for alias in row.aliases)


def test_the_default_given_explicitly_is_no_reason_for_a_warning():
    assert read_settings({NEW: "600", "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "0"}).notices == ()


def test_every_variable_that_the_product_reads_is_in_the_table():
    """A variable that is not classed 'in key' or 'not in key' is how stale entries are served."""
    package = Path(vllm_neuron.__file__).parent
    pattern = re.compile(
        r"(?:environ(?:\.get|\.setdefault|\.pop)?[\[(]|getenv\(|settings\[|settings\.get\()\s*"
        r"[\"']([A-Z][A-Z0-9_]+)[\"']"
    )
    read = {
        name for path in package.rglob("*.py") for name in pattern.findall(path.read_text("utf-8"))
    }
    # These say where the caches, programs and the XLA route's environment are by default.
    known = {"XDG_CACHE_HOME", "XDG_DATA_HOME", "USER", "PATH"}
    # vLLM's own, which `vllm-neuron compare` sets before it loads vLLM.
    known |= {"VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM", "VLLM_NO_USAGE_STATS"}
    assert read - set(envs.VARIABLES) <= known
    assert all(isinstance(row.key, KeyClass) for row in envs.VARIABLES.values())


def test_key_factors_are_the_variables_in_key_and_nothing_else():
    base = read_settings({}).key_factors()
    assert set(base) == {r.name for r in envs.VARIABLES.values() if r.key is KeyClass.IN_KEY}
    changed = read_settings({"VLLM_NEURON_SWITCH_CC": "yes", "VLLM_NEURON_LOG_LEVEL": "DEBUG"})
    assert changed.key_factors() == base | {"VLLM_NEURON_SWITCH_CC": "True"}
    same = read_settings({"VLLM_NEURON_SWITCH_CC": "on"})
    assert same.key_factors() == changed.key_factors()


def test_cache_directories():
    assert read_settings({}).cache_root == Path("~/.cache/vllm").expanduser()
    assert read_settings({"XDG_CACHE_HOME": "/xdg"}).cache_root == Path("/xdg/vllm")
    settings = read_settings({"VLLM_CACHE_ROOT": "/root/of/caches"})
    assert str(settings.precompile_directory) == "/root/of/caches/neuron/precompile"
    assert str(settings.compile_cache_directory) == "/root/of/caches/neuron/compile_cache"


@pytest.mark.parametrize(
    ("mounts", "is_nfs"),
    [
        ("/dev/sda / ext4 rw 0 0\n", False),
        ("/dev/sda / ext4 rw 0 0\nhost:/home {home} nfs4 rw 0 0\n", True),
        ("host:/root / nfs rw 0 0\n/dev/sdb {home} xfs rw 0 0\n", False),
        ("host:/root / nfs rw 0 0\n", True),
        ("", False),
    ],
)
def test_a_cache_root_on_nfs_moves_the_compilation_cache(monkeypatch, tmp_path, mounts, is_nfs):
    home = tmp_path / "a home"
    monkeypatch.setenv("HOME", str(home))
    table = tmp_path / "mounts"
    table.write_text(mounts.format(home=str(home).replace(" ", r"\040")))
    settings = read_settings({"USER": "ada"}, mounts=table)
    assert settings.precompile_directory == home / ".cache/vllm/neuron/precompile"
    if is_nfs:
        moved = Path("/tmp/vllm_neuron_wdir_ada/neuron/compile_cache")
        assert settings.compile_cache_directory == moved
        (notice,) = settings.notices
        assert "is on NFS" in notice
        assert "VLLM_CACHE_ROOT" in notice
    else:
        here = home / ".cache/vllm/neuron/compile_cache"
        assert (settings.compile_cache_directory, settings.notices) == (here, ())
    given = read_settings({"VLLM_CACHE_ROOT": str(home / "x")}, mounts=table)
    assert given.compile_cache_directory == home / "x/neuron/compile_cache"
    assert given.notices == ()


@pytest.mark.parametrize(
    ("kind", "found"), [("tmpfs", "tmpfs"), ("ramfs", "ramfs"), ("ext4", None), ("overlay", None)]
)
def test_temporary_file_systems(tmp_path, kind, found):
    table = tmp_path / "mounts"
    table.write_text(f"/dev/sda / xfs rw 0 0\nx /cache {kind} rw 0 0\n")
    inside, beside = Path("/cache/vllm/neuron"), Path("/cached")
    assert envs.temporary_file_system(inside, mounts=table) == found
    assert envs.temporary_file_system(beside, mounts=table) is None
    assert envs.temporary_file_system(inside, mounts=tmp_path / "missing") is None


def test_settings_are_frozen_and_survive_pickling():
    settings = read_settings({NEW: "8"})
    with pytest.raises(AttributeError):
        settings.notices = ()
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert set(settings) == set(envs.VARIABLES)


def test_misspelt_names_get_the_closest_known_one():
    environ = {
        "VLLM_NEURON_BACKND": "x",
        "VLLM_NEURON_COMPILATION_TIMEOUTS": "3",
        "NEURON_LIBTORCH_REMOTE_CACH": "x",
        "VLLM_NEURON_QQQQQQQQQQ": "x",
        "VLLM_NEURON_BACKEND": "neuron",
        OLD: "3",
        "VLLM_CACHE_ROT": "vLLM's business",
    }
    assert envs.unknown_variables(environ) == {
        "NEURON_LIBTORCH_REMOTE_CACH": "NEURON_LIBTORCH_REMOTE_CACHE",
        "VLLM_NEURON_BACKND": "VLLM_NEURON_BACKEND",
        "VLLM_NEURON_COMPILATION_TIMEOUTS": "NEURON_LIBTORCH_COMPILATION_TIMEOUT",
        "VLLM_NEURON_QQQQQQQQQQ": None,
    }


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_NEURON_SVC_SERVICE_HOST",
        "VLLM_NEURON_SVC_SERVICE_PORT",
        "VLLM_NEURON_SVC_SERVICE_PORT_HTTP",
        "VLLM_NEURON_SVC_PORT",
        "VLLM_NEURON_SVC_PORT_8000_TCP",
        "VLLM_NEURON_SVC_PORT_8000_TCP_PROTO",
        "VLLM_NEURON_SVC_PORT_8000_TCP_PORT",
        "VLLM_NEURON_SVC_PORT_8000_TCP_ADDR",
    ],
)
def test_variables_of_a_kubernetes_service_are_ignored(name):
    assert envs.is_service_variable(name)
    assert envs.unknown_variables({name: "tcp://10.0.0.1:8000"}) == {}


def test_own_variables_are_not_taken_for_service_variables():
    assert [name for name in envs.VARIABLES if envs.is_service_variable(name)] == []


@pytest.mark.parametrize(
    ("value", "name", "native"),
    [
        (None, "neuron_native", True),
        ("neuron", "neuron_native", True),
        ("vllm_neuron ", "vllm_neuron", False),
        ("xla", "neuron_native", True),
    ],
)
def test_compile_backend_name_before_any_start(monkeypatch, value, name, native):
    monkeypatch.setattr("vllm_neuron.route._current", None)
    monkeypatch.delenv("VLLM_NEURON_BACKEND", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_NEURON_BACKEND", value)
    assert envs.get_compile_backend_name() == name
    assert envs.is_native_backend() is native


def test_the_record_of_the_start_wins_over_a_changed_variable(monkeypatch):
    from vllm_neuron import route

    record = route.resolve(
        "vllm_neuron",
        explicit_level=None,
        level_origin="default",
        cpu_mode=False,
        torch_caching=None,
        precompile_directory="",
    )
    settings = read_settings({"VLLM_CACHE_ROOT": "/of/the/start"})
    monkeypatch.setattr(route, "_current", route.StartRecord(record, settings, None, None))
    monkeypatch.setenv("VLLM_NEURON_BACKEND", "neuron_native")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/of/later")
    assert envs.get_compile_backend_name() == "vllm_neuron"
    assert envs.get_neuron_compile_cache_dir() == "/of/the/start/neuron/compile_cache"


def test_without_a_home_directory_the_caches_go_to_a_named_place(monkeypatch):
    """bugs E07."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 54321)
    settings = read_settings({})
    assert settings["VLLM_CACHE_ROOT"] == Path("/tmp/vllm_neuron_cache_54321/vllm")
    assert any("There is no home directory for user id 54321" in text for text in settings.notices)
    with pytest.raises(ConfigurationError, match="there is no such home directory"):
        read_settings({"VLLM_CACHE_ROOT": "~no-such-user/cache"})


def test_compiled_artefacts_must_be_a_directory(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigurationError, match=r"_ARTIFACTS=.* is not a directory"):
        read_settings({"NEURON_COMPILED_ARTIFACTS": str(file)})
    for place in (tmp_path, tmp_path / "absent"):
        assert read_settings({"NEURON_COMPILED_ARTIFACTS": str(place)}).notices == ()


def test_a_remote_cache_that_is_not_there_counts_as_empty(tmp_path):
    name = "NEURON_LIBTORCH_REMOTE_CACHE"
    assert read_settings({name: str(tmp_path)}).notices == ()
    (notice,) = read_settings({name: f"{tmp_path}/absent"}).notices
    assert notice == (
        f"{name}={tmp_path}/absent is not a directory: it counts as empty. Is its file system "
        "mounted?"
    )


@pytest.mark.parametrize(
    "strict", ["VLLM_NEURON_DISABLE_WARMUP_COMPILE", "NEURON_LIBTORCH_ASSERT_CACHE_HIT"]
)
def test_strict_without_a_cache_is_a_contradiction(strict):
    assert read_settings({strict: "1"}).strict_variable == strict
    off = "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"
    with pytest.raises(ConfigurationError) as caught:
        read_settings({strict: "1", off: "1"})
    assert strict in str(caught.value)
    assert off in str(caught.value)


@pytest.mark.parametrize("user", ["../../etc", "a/b", ".", "..", "", "-x", "a b"])
def test_a_user_name_cannot_lead_out_of_the_temporary_directory(tmp_path, user):
    mounts = tmp_path / "mounts"
    mounts.write_text("server:/home /home nfs4 rw 0 0\n")
    settings = read_settings({"XDG_CACHE_HOME": "/home/me/.cache", "USER": user}, mounts=mounts)
    expected = f"/tmp/vllm_neuron_wdir_{os.getuid()}/neuron/compile_cache"
    assert str(settings.compile_cache_directory) == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1K", 1 << 10),
        ("500M", 500 << 20),
        ("20G", 20 << 30),
        ("1.5 GiB", 3 << 29),
        ("2tb", 2 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    name = "VLLM_NEURON_CACHE_MAX_SIZE"
    assert read_settings({name: text})[name] == size


@pytest.mark.parametrize("text", ["0", "-1G", "G", "10 apples", "1e9"])
def test_what_is_no_size_is_an_error(text):
    with pytest.raises(ConfigurationError, match="expected a size above 0 such as 500M, 20G"):
        read_settings({"VLLM_NEURON_CACHE_MAX_SIZE": text})
