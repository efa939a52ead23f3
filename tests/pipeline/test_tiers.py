"""Caches of several directories: what is read where, fetched, promoted, and forbidden."""

from __future__ import annotations

import logging
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.pipeline.step_modules import CachedProjection, build, counts, make_pipeline
from tests.pipeline.test_pipeline import (
    EVERYTHING,
    NOTHING,
    entries,
    finish,
    run_start,
    start,
)
from vllm_neuron import _core
from vllm_neuron.cache import keys, save_cache
from vllm_neuron.cache.tiers import Tiers
from vllm_neuron.errors import CacheMissError
from vllm_neuron.pipeline import Pipeline


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """A local cache of a cold start, with all that it made promoted to `remote`."""
    root = tmp_path_factory.mktemp("filled")
    pipeline = make_pipeline(root, remote=root / "remote", promotes=True)
    build(pipeline, CachedProjection())
    assert counts(pipeline) == EVERYTHING
    return root


@pytest.fixture
def remote(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled / "remote", tmp_path / "remote"))


def files(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in root.rglob("*")
        if path.is_file()
    }


def requests(pipeline: Pipeline) -> dict[tuple[str, str], int]:
    assert pipeline._compilation.tiers is not None
    return dict(pipeline._compilation.tiers.requests)


def test_a_fresh_pod_with_a_filled_remote_does_nothing_b01_e02(remote, tmp_path, caplog):
    """bugs B01, B17, E02: the remote tier is read before anything is made, and never written."""
    caplog.set_level(logging.INFO)
    before = files(remote)
    assert counts(start(tmp_path / "pod", remote=remote)) == NOTHING
    assert f"Remote cache {remote}: remote hit 2/2 (NEFFs)" in caplog.text
    assert f"Remote cache {remote}: remote hit 2/2 (traces)" in caplog.text
    assert "Remote artifacts fetched to local cache: " in caplog.text
    assert files(remote) == before
    # The pod has copies of its own, byte for byte.
    shutil.rmtree(remote)
    caplog.clear()
    assert counts(start(tmp_path / "pod", remote=remote)) == NOTHING
    assert "remote hit 0/0 (NEFFs)" in caplog.text
    for kind in ("trace", "neff"):
        for path in entries(tmp_path / "pod", kind):
            name = f"v1/{path.parent.name}/{path.name}"
            assert path.read_bytes() == before[name][1]


def test_eight_servers_on_one_cold_cache_compile_each_key_once_and_all_serve(filled, tmp_path):
    """bugs D02, D04, C08: whole pipelines in processes of their own; each checks its results."""
    shutil.copytree(filled / "precompile", tmp_path / "precompile")
    processes = [run_start(tmp_path) for _ in range(8)]
    done = [finish(process)[0]["counts"] for process in processes]
    assert sum(found["compilations"] for found in done) == 2
    assert all(found["traces"] == 0 for found in done)
    # The next one finds everything.
    assert counts(start(tmp_path)) == NOTHING


def test_only_traces_in_the_near_cache_fetch_their_neffs(remote, filled, tmp_path):
    shutil.copytree(filled / "precompile", tmp_path / "pod" / "precompile")
    pipeline = start(tmp_path / "pod", remote=remote)
    assert counts(pipeline) == NOTHING
    assert requests(pipeline) == {("local", "miss"): 4, ("remote", "hit"): 2}


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_remote_entry_is_made_anew_t13(remote, tmp_path, caplog, damage):
    """bugs C04, E05: what is wrong there is a miss with a reason, and is not copied."""
    store = _core.Store(str(remote))
    victim = Path(next(info.path for info in store.entries() if info.kind == "neff"))
    content = bytearray(victim.read_bytes())
    victim.chmod(0o600)
    if damage == "flipped":
        content[5000] ^= 1
    victim.write_bytes(b"" if damage == "empty" else content[: len(content) - 5000])
    if damage == "flipped":
        victim.write_bytes(content)
    victim.chmod(0o400)
    caplog.set_level(logging.INFO)
    assert counts(start(tmp_path / "pod", remote=remote)) == {**NOTHING, "compilations": 1}
    assert victim.name in caplog.text
    # The module that was fetched to compile it is no NEFF.
    assert f"Remote cache {remote}: remote hit 1/2 (NEFFs)" in caplog.text


def test_a_missing_remote_is_an_empty_one(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert counts(start(tmp_path, remote=tmp_path / "absent")) == EVERYTHING
    assert "remote directory does not exist" in caplog.text
    assert not (tmp_path / "absent").exists()


def test_compiled_artefacts_are_read_and_written_t14(filled, remote, tmp_path):
    """Empty or absent: made and filled. Filled: loaded. With a remote: asked first (spec CC-5)."""
    place = tmp_path / "artefacts"
    assert counts(start(tmp_path / "one", artifacts=place)) == EVERYTHING
    kinds = sorted(info.kind for info in _core.Store(str(place)).entries())
    assert kinds == ["lowering", "lowering", "neff", "neff", "trace", "trace"]
    other = start(tmp_path / "two", artifacts=place, remote=remote)
    assert counts(other) == NOTHING
    assert requests(other) == {("local", "miss"): 2, ("artifacts", "hit"): 2}
    # Nothing is copied; only the report of the start is there.
    assert [path.name for path in (tmp_path / "two").rglob("*")] == ["neuron", "last_start.json"]


def test_foreign_content_of_compiled_artefacts_is_a_miss_t14(filled, tmp_path, caplog):
    """bugs C02: neither a writer's temporary file nor somebody's junk is looked at or touched."""
    place = tmp_path / "artefacts"
    neff = entries(filled, "neff")[0]
    junk = [place / ".123.tmp", place / "v1" / "notes.txt", place / "MODULE_1" / "model.neff"]
    for path in junk:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(neff.read_bytes()[:100])
    wrong = place / "v1" / neff.name[:2] / neff.name
    wrong.parent.mkdir()
    wrong.write_bytes(b"foreign")
    for directory in (place, place / "v1", wrong.parent):
        directory.chmod(0o700)
    shutil.copytree(filled / "precompile", tmp_path / "precompile")
    pipeline = start(tmp_path, artifacts=place)
    assert counts(pipeline) == {**NOTHING, "compilations": 2}
    assert all(path.exists() for path in junk)
    assert _core.Store(str(place)).get("neff", neff.name) is not None


def test_strict_mode_finds_what_is_remote_only_t13(remote, tmp_path):
    strict = "VLLM_NEURON_DISABLE_WARMUP_COMPILE"
    assert counts(start(tmp_path, remote=remote, strict=strict)) == NOTHING


@pytest.mark.parametrize(
    "strict", ["VLLM_NEURON_DISABLE_WARMUP_COMPILE", "NEURON_LIBTORCH_ASSERT_CACHE_HIT"]
)
def test_strict_mode_names_all_that_is_missing_t13(filled, remote, tmp_path, strict):
    shutil.copytree(filled / "precompile", tmp_path / "pod" / "precompile")
    store = _core.Store(str(remote))
    neffs = [info for info in store.entries() if info.kind == "neff"]
    for info in neffs:
        assert store.remove("neff", info.key)
    pipeline = make_pipeline(tmp_path / "pod", remote=remote, strict=strict)
    with pytest.raises(CacheMissError) as caught:
        build(pipeline, CachedProjection())
    text = str(caught.value)
    assert text.startswith(f"{strict}=1 forbids compiling, and 2 of 2 graphs are in no cache:\n")
    assert sorted(key for _, key in caught.value.missing) == sorted(info.key for info in neffs)
    for bucket, key in caught.value.missing:
        assert f"  {bucket}: key {key[:32]}\n" in text
    for place in (tmp_path / "pod" / "compile_cache", remote):
        assert str(place) in text
    assert pipeline.counters.compilations == 0


def test_save_cache_promotes_once_from_many_nodes_t13(filled, tmp_path):
    local, target = filled / "compile_cache", tmp_path / "shared"
    barrier = threading.Barrier(8)

    def promote(_: int):
        barrier.wait()
        return save_cache(local, target)

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(promote, range(8)))
    assert sum(promotion.promoted for promotion in done) == 4
    assert all(promotion.promoted + promotion.existed == 4 for promotion in done)
    assert {info.key for info in _core.Store(str(target)).entries()} == {
        info.key for info in _core.Store(str(local)).entries()
    }
    before = files(target)
    assert save_cache(local, target).promoted == 0
    assert files(target) == before


def test_save_cache_of_one_key(filled, tmp_path):
    local, target = filled / "compile_cache", tmp_path / "shared"
    neff = entries(filled, "neff")[0]
    assert save_cache(local, target, neff.name[:32]).promoted == 1
    assert save_cache(str(local), str(target), hash_key=neff.name).existed == 1
    assert [info.key for info in _core.Store(str(target)).entries()] == [neff.name]
    with pytest.raises(RuntimeError, match="no complete entry 00000"):
        save_cache(local, target, "0" * 32)
    damaged = tmp_path / "damaged"
    shutil.copytree(local, damaged)
    path = damaged / "v1" / neff.parent.name / neff.name
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:5000])
    path.chmod(0o400)
    with pytest.raises(RuntimeError, match="no complete entry"):
        save_cache(damaged, tmp_path / "other", neff.name)


def test_a_trace_of_other_sources_is_replaced_when_it_is_promoted(filled, remote, tmp_path):
    store = _core.Store(str(remote))
    info = next(info for info in store.entries() if info.kind == "trace")
    entry = store.get("trace", info.key)
    sections = {name: bytes(entry.section(name)) for name in entry.sections}
    stale = sections | {"record": sections["record"].replace(b'"sources":{', b'"sources":{"x":"",')}
    assert stale != sections
    store.remove("trace", info.key)
    assert store.put("trace", info.key, stale)
    # The stale one is a miss, and the node that finds it so does not touch what others read.
    assert counts(start(tmp_path / "pod", remote=remote)) == {**NOTHING, "traces": 1}
    assert bytes(store.get("trace", info.key).section("record")) == stale["record"]
    promotion = save_cache(tmp_path / "pod" / "precompile", remote)
    assert (promotion.promoted, promotion.existed) == (1, 1)
    assert counts(start(tmp_path / "third", remote=remote)) == NOTHING


def test_entries_have_the_readers_of_their_directory(filled, tmp_path):
    for mode, entry_mode, directory_mode in (
        (0o755, 0o444, 0o755),
        (0o750, 0o440, 0o750),
        (0o700, 0o400, 0o700),
    ):
        target = tmp_path / f"{mode:o}"
        target.mkdir()
        target.chmod(mode)
        save_cache(filled / "compile_cache", target)
        for info in _core.Store(str(target)).entries():
            path = Path(info.path)
            assert path.stat().st_mode & 0o777 == entry_mode
            assert path.parent.stat().st_mode & 0o777 == directory_mode
        assert len(_core.Store(str(target)).entries()) == 4


def test_one_by_one_gives_the_same(tmp_path):
    assert counts(start(tmp_path, one_by_one=True)) == EVERYTHING
    assert counts(start(tmp_path)) == NOTHING


def test_the_local_cache_stays_within_its_size_h01(tmp_path):
    """bugs H01: never above the limit; what was used longest ago goes first."""
    limit, size = 10 << 20, 1 << 20
    tiers = Tiers(
        tmp_path, name="c", logger=logging.getLogger("c"), max_size_bytes=limit, remote=None
    )
    made = [keys.key_of("neff", {"number": number}) for number in range(40)]
    for number, key in enumerate(made):
        tiers.put("neff", key, {"neff": bytes([number]) * (size - 8192)})
        total = sum(path.stat().st_size for path in tmp_path.glob("v1/??/*"))
        assert total <= limit
    kept = {info.key for info in _core.Store(str(tmp_path)).entries()}
    assert kept == {key.hex for key in made[-len(kept) :]}
    assert len(kept) == 10


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_start_says_what_the_next_one_will_not_find(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    start(tmp_path / "fits", max_size_bytes=1 << 30)
    assert not any("the next start makes them again" in line for line in messages(caplog))
    start(tmp_path / "small", max_size_bytes=1)
    lost = [line for line in messages(caplog) if "the next start makes them again" in line]
    reason = "they do not fit in 1 bytes, which is this cache's part of VLLM_NEURON_CACHE_MAX_SIZE"
    assert len(lost) == 2
    for line, name in zip(lost, ("Precompile Cache", "Compilation cache"), strict=True):
        assert line.startswith(f"{name}: ")
        assert f"({reason}), and the next start makes them again" in line


def test_a_directory_that_takes_nothing_is_said_once(tmp_path, caplog):
    for name in ("precompile", "compile_cache"):
        (tmp_path / name).write_text("a file")
    pipeline = start(tmp_path)
    assert counts(pipeline) == EVERYTHING
    assert pipeline.counters.compilations == 2
    for text in ("not written to", "no locks in", "the next start makes them again"):
        found = [line for line in messages(caplog) if text in line]
        assert len(found) == len({line.partition(":")[0] for line in found}), found
        assert found
