"""The merge of the plugin's compiler arguments with NEURON_CC_FLAGS (T-4)."""

import pytest

from vllm_neuron.compiler.base import compiler_arguments
from vllm_neuron.errors import ConfigurationError

OWN = ("--framework", "XLA", "--target", "trn2", "--model-type", "transformer", "--lnc", "2")


def merged(extra, level=2, target="trn2"):
    return compiler_arguments(level, extra=extra, target=target)


@pytest.mark.parametrize(("level", "option"), [(0, "-O1"), (1, "-O1"), (2, "-O2"), (3, "-O3")])
def test_the_plugins_own_arguments(level, option):
    found = merged(None, level)
    assert found.arguments == (*OWN, option, "--auto-cast=none")
    assert (found.level, found.level_source) == (int(option[2]), "vLLM")
    assert found.warnings == ()
    assert found.notices == (
        ("neuronx-cc has no level O0: compiling with -O1",) if level == 0 else ()
    )


def test_the_host_emulator_has_one_core_per_program():
    assert merged(None, target="host").arguments == (
        *("--framework", "XLA", "--target", "host", "--model-type", "transformer", "--lnc", "1"),
        "-O2",
        "--auto-cast=none",
    )


def test_level_zero_and_one_are_one_key():
    assert merged(None, 0).key_arguments == merged(None, 1).key_arguments


@pytest.mark.parametrize("level", [-1, 4, None, "2"])
def test_a_level_that_vllm_does_not_have(level):
    with pytest.raises(ConfigurationError, match="optimization level") as caught:
        merged(None, level)
    assert caught.value.name == "optimization_level"


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("", (*OWN, "-O2", "--auto-cast=none")),
        ("  \t ", (*OWN, "-O2", "--auto-cast=none")),
        ("-O3", (*OWN, "-O3", "--auto-cast=none")),
        ("-O 1", (*OWN, "-O1", "--auto-cast=none")),
        ("-O=1", (*OWN, "-O1", "--auto-cast=none")),
        ("--optlevel 1", (*OWN, "-O1", "--auto-cast=none")),
        ("--optlevel=3 -O1", (*OWN, "-O1", "--auto-cast=none")),
        ("--auto-cast=all --auto-cast matmult", (*OWN, "-O2", "--auto-cast", "matmult")),
        ("--lnc 1", (*OWN[:-2], "--lnc", "1", "-O2", "--auto-cast=none")),
        ("-lnc 1", (*OWN[:-2], "-lnc", "1", "-O2", "--auto-cast=none")),
        (
            "--logical-nc-config=1",
            (*OWN[:-2], "--logical-nc-config=1", "-O2", "--auto-cast=none"),
        ),
        ("--verbose=35", (*OWN, "-O2", "--auto-cast=none", "--verbose=35")),
        # What vLLM Omni sets (OL-24).
        (
            "-O1 --hbm-scratchpad-page-size=2048",
            (*OWN, "-O1", "--auto-cast=none", "--hbm-scratchpad-page-size=2048"),
        ),
        (
            "--internal-backend-options='--enable-verifier=false --x'",
            (
                *OWN,
                "-O2",
                "--auto-cast=none",
                "--internal-backend-options=--enable-verifier=false --x",
            ),
        ),
        (
            "--internal-backend-options '--enable-verifier=false --x'",
            (
                *OWN,
                "-O2",
                "--auto-cast=none",
                "--internal-backend-options",
                "--enable-verifier=false --x",
            ),
        ),
        (
            "--enable-mixed-precision-accumulation --disable-mixed-precision-accumulation",
            (*OWN, "-O2", "--auto-cast=none", "--disable-mixed-precision-accumulation"),
        ),
        (
            "--enable-saturate-infinity --native-int64 enabled",
            (
                *OWN,
                "-O2",
                "--auto-cast=none",
                "--enable-saturate-infinity",
                "--native-int64",
                "enabled",
            ),
        ),
    ],
)
def test_flags_are_appended_and_the_right_most_wins(extra, arguments):
    assert merged(extra).arguments == arguments


@pytest.mark.parametrize(
    ("extra", "level", "source", "notices"),
    [
        ("-O3", 3, "NEURON_CC_FLAGS", ()),
        ("-O0", 1, "NEURON_CC_FLAGS", ("neuronx-cc has no level O0: compiling with -O1",)),
        ("--verbose=35", 1, "vLLM", ("neuronx-cc has no level O0: compiling with -O1",)),
    ],
)
def test_who_set_the_level(extra, level, source, notices):
    found = merged(extra, level=0)
    assert (found.level, found.level_source, found.notices) == (level, source, notices)


def test_the_line_with_the_merged_arguments():
    assert merged("-O3 --tensorizer-options='--a --b'").describe() == (
        "Compiler arguments: --framework XLA --target trn2 --model-type transformer --lnc 2 -O3 "
        "--auto-cast=none '--tensorizer-options=--a --b' (level O3 set by NEURON_CC_FLAGS)"
    )


def test_each_wrapper_option_is_dropped_with_one_warning():
    found = merged(
        "--cache_dir=/tmp/x --no_cache --retry_failed_compilation --log_level INFO --no_cache"
    )
    plain = merged(None)
    assert (found.arguments, found.key_arguments) == (plain.arguments, plain.key_arguments)
    assert found.warnings == (
        "NEURON_CC_FLAGS: --cache_dir belongs to another compiler wrapper and is not forwarded; "
        "set VLLM_CACHE_ROOT (or NEURON_COMPILED_ARTIFACTS for an additional store)",
        "NEURON_CC_FLAGS: --no_cache belongs to another compiler wrapper and is not forwarded; "
        "set NEURON_LIBTORCH_DISABLE_COMPILE_CACHE=1",
        "NEURON_CC_FLAGS: --retry_failed_compilation belongs to another compiler wrapper and is "
        "not forwarded; nothing is needed: failed compilations are never cached",
        "NEURON_CC_FLAGS: --log_level belongs to another compiler wrapper and is not forwarded; "
        "set VLLM_NEURON_LOG_LEVEL",
    )


def test_a_target_in_the_flags():
    assert merged("--target trn1").target == "trn1"
    host = merged("--target trn1", target="host")
    assert (host.target, host.arguments) == ("host", merged(None, target="host").arguments)
    assert host.warnings == (
        "NEURON_CC_FLAGS: --target trn1 is not forwarded; the host emulator compiles for target "
        "host only",
    )


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ('--internal-backend-options="--a', "No closing quotation"),
        ("'", "No closing quotation"),
        ("-O9", "'9'"),
        ("-O", "None"),
        ("--optlevel fast", "'fast'"),
        ("fast", "'fast' is neither an option nor the value of one"),
        ("--enable-saturate-infinity yes", "'yes' is neither an option nor the value of one"),
        ("--lnc 1 2", "'2' is neither an option nor the value of one"),
        ("-", "'-' is neither an option nor the value of one"),
    ],
)
def test_flags_that_cannot_be_parsed(extra, reason):
    with pytest.raises(ConfigurationError) as caught:
        merged(extra)
    assert str(caught.value).startswith(f"NEURON_CC_FLAGS={extra!r}")
    assert reason in str(caught.value)
    assert (caught.value.name, caught.value.value) == ("NEURON_CC_FLAGS", extra)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "--native-int64 enabled --auto-cast-type fp16",
            "--auto-cast-type=fp16 --native-int64=enabled",
        ),
        ("-O3", "--optlevel   3"),
        ("--lnc 1", "--logical-nc-config=1"),
        ("--verbose=35 --logfile a.txt --output b.neff", ""),
        ("--internal-backend-options='--a  --b'", "--internal-backend-options='--a --b '"),
        ("--auto-cast=all --auto-cast=none", ""),
        ("--disable-x --enable-x", "--enable-x"),
        ("--no_cache", ""),
    ],
)
def test_one_key(one, other):
    assert merged(one).key_arguments == merged(other).key_arguments


@pytest.mark.parametrize(
    "extra",
    [
        "-O3",
        "--lnc 1",
        "--auto-cast=all",
        "--enable-saturate-infinity",
        "--disable-saturate-infinity",
        "--internal-backend-options=--enable-verifier=false",
        "--hbm-scratchpad-page-size=2048",
        "--target trn1",
    ],
)
def test_another_key(extra):
    assert merged(extra).key_arguments != merged(None).key_arguments


def test_the_key_form():
    assert merged("--verbose=35 --enable-saturate-infinity").key_arguments == (
        "--auto-cast=none",
        "--enable-saturate-infinity=on",
        "--framework=XLA",
        "--logical-nc-config=2",
        "--model-type=transformer",
        "--optlevel=2",
        "--target=trn2",
    )
