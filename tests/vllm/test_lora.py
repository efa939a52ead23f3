"""LoRA adapters, compiled ahead, in one batch, replaced, loaded while the server runs.

The right answers are transformers' from checkpoints with the adapters merged into the weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import models
from tests.adapters import build_adapter, merge
from tests.serving import SMALL, Server
from tests.vllm.engine import CPU_MODE, HOST, Engine, EngineError, model_runner
from tests.vllm.test_generation import random_tokens
from tests.vllm.test_restarts import summary

pytestmark = pytest.mark.serve

TOKENS = 64
BUCKETS = {"neuron_config": {"num_batched_tokens_buckets": [256], "num_seqs_buckets": [1, 4]}}
OPTIONS = {
    **{"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 3},
    "additional_config": BUCKETS,
}
ARGUMENTS = (
    *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "16", "--max-cpu-loras", "3"),
    *("--additional-config", json.dumps(BUCKETS)),
    *SMALL,
)
GRAPHS = 3
COLD = {"state": "cold", "loaded": 0, "graphs": GRAPHS} | dict.fromkeys(
    ("traces", "lowerings", "compilations"), GRAPHS
)
WARM = {"state": "warm", "loaded": GRAPHS, "graphs": GRAPHS} | dict.fromkeys(
    ("traces", "lowerings", "compilations"), 0
)

#: Modules, rank and alpha. All linear layers, the embedding and the projection to the vocabulary.
ADAPTERS = {
    "attention": (("q_proj", "v_proj", "o_proj", "lm_head"), 8, 16),
    "mlp": (("k_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens"), 4, 4),
    "full": (("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"), 16, 16),
    "values": (("v_proj",), 2, 8),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint, its adapters, and a cache that has every graph of a server with adapters.

    Attributes:
        model: folder of the checkpoint.
        adapters: folders by name.
        merged: folder of the checkpoint with an adapter merged by the adapter's name; "" is the
            checkpoint.
        cache_root: filled by a CPU compile.
        compiled: the log of that.
    """

    model: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]
    cache_root: Path
    compiled: list[str]

    def greedy(self, adapter: str, prompt: list[int], tokens: int = TOKENS) -> list[int]:
        """What transformers generate with an adapter."""
        return models.greedy(self.merged[adapter], [prompt], tokens=tokens)[0]


@pytest.fixture(scope="module")
def case(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Case:
    model, folder = checkpoint("llama"), tmp_path_factory.mktemp("lora")
    adapters = {
        name: build_adapter(folder / name, model, modules, rank=rank, alpha=alpha, seed=seed)
        for seed, (name, (modules, rank, alpha)) in enumerate(ADAPTERS.items())
    }
    merged = {
        name: merge(folder / f"merged-{name}", model, adapter) for name, adapter in adapters.items()
    }
    server = Server(
        model,
        cache_root=folder / "cache",
        folder=folder,
        arguments=ARGUMENTS,
        environment={"VLLM_NEURON_CPU_COMPILE": "1"},
        fork=True,
    )
    try:
        server.start()
        assert server.wait_exit() == 0, server.log_path.read_text()
        assert summary(server) == COLD
    finally:
        server.close()
    return Case(model, adapters, {"": model, **merged}, folder / "cache", server.log_lines())


def generate(llm, requests, tokens, **params):
    """Greedy tokens and prompt logprobs of (prompt, adapter name, id, path) in one call."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, *_ in requests],
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **params),
        lora_request=[LoRARequest(*adapter) if adapter[1] else None for _, *adapter in requests],
    )
    return [(list(output.outputs[0].token_ids), output.prompt_logprobs) for output in outputs]


def held(llm):
    """Ids of the adapters in slots, and of those in memory."""
    return set(model_runner(llm).adapters._slots.lora_index_to_id), llm.llm_engine.list_loras()


def work(llm):
    """How often the engine has traced, lowered and compiled, and found traces and NEFFs."""
    done = model_runner(llm).execution.pipeline.counters
    return done.traces, done.lowerings, done.compilations, done.trace_hits, done.neff_hits


def request(case, prompt, name):
    """A request of `generate`; the id of an adapter is its place in `ADAPTERS`, from 1."""
    if not name:
        return prompt, "", 0, ""
    return prompt, name, list(ADAPTERS).index(name) + 1, str(case.adapters[name])


def test_adapters_and_the_base_model_in_one_batch(case: Case):
    """The engine starts from what the CPU compile left, and no adapter is traced or compiled."""
    prompt = random_tokens(70, seed=1)
    memory = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 16 << 20}
    with Engine(case.model, HOST, cache_root=case.cache_root, **OPTIONS, **memory) as engine:

        def check(*names, tokens=TOKENS, prompt=prompt):
            requests = [request(case, prompt, name) for name in names]
            found = engine.call(generate, requests, tokens)
            right = [case.greedy(name, prompt, tokens) for name in names]
            assert [answer for answer, _ in found] == right, names
            return right

        # One prompt for all: the prefix cache must not give one the blocks of another.
        answers = check("attention", "", "mlp", "attention")
        assert len({tuple(answer) for answer in answers}) == 3
        assert engine.call(held) == ({1, 2}, {1, 2})
        # More adapters than slots: vLLM makes the third wait, then takes a slot for it.
        check("full", "mlp", "", "attention", tokens=20)
        slots, known = engine.call(held)
        assert len(slots) == 2
        assert slots < {1, 2, 3}
        assert known == {1, 2, 3}
        # More than there is memory for: the one that was used longest ago is forgotten.
        check("full", "attention", tokens=20)
        check("values", tokens=20)
        assert engine.call(held)[1] == {1, 3, 4}
        # Alone, in graphs of one sequence, and with prompts longer than a chunk of the cache.
        for name in ("mlp", "", "full"):
            check(name, tokens=20, prompt=random_tokens(131, seed=2))

        right = prompt_logprobs(case.merged["attention"], prompt)
        requests = [request(case, prompt, name) for name in ("attention", "")]
        (_, found), (_, other) = engine.call(generate, requests, 1, prompt_logprobs=1)
        assert logprobs_of(found, prompt) == pytest.approx(right, abs=1e-3)
        assert logprobs_of(other, prompt) != pytest.approx(right, abs=1e-1)

        refused = engine.call(add, "broken", 9, str(broken(case, case.cache_root.parent)))
        assert "has a value that is not finite" in refused
        # One that is pinned keeps its slot.
        assert engine.call(pin, *request(case, prompt, "mlp")[1:]) is True
        check("full", "mlp", tokens=8)
        check("attention", "mlp", tokens=8)
        assert 2 in engine.call(held)[0]
        assert engine.call(work) == (0, 0, 0, GRAPHS, GRAPHS)


def prompt_logprobs(folder, prompt):
    logits = models._loaded(folder, torch.float32)(torch.tensor([prompt])).logits[0]
    scores = logits.log_softmax(-1)
    return [scores[at, token].item() for at, token in enumerate(prompt[1:])]


def logprobs_of(prompt_logprobs, prompt):
    pairs = zip(prompt_logprobs[1:], prompt[1:], strict=True)
    return [found[token].logprob for found, token in pairs]


def broken(case, folder):
    """An adapter with an infinity in it."""
    path = shutil.copytree(case.adapters["values"], folder / "broken", dirs_exist_ok=True)
    tensors = load_file(path / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("inf")
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def add(llm, name, number, path):
    from vllm.lora.request import LoRARequest

    try:
        llm.llm_engine.add_lora(LoRARequest(name, number, path))
    except ValueError as error:
        return str(error)
    return None


def pin(llm, name, number, path):
    add(llm, name, number, path)
    return llm.llm_engine.pin_lora(number)


def test_a_server_loads_adapters_while_it_runs(case: Case, serve: Callable[..., Server]):
    assert f"{GRAPHS} of {GRAPHS} graphs are in the caches" in case.compiled
    server = serve(
        case.model,
        cache_root=case.cache_root,
        arguments=(*ARGUMENTS, "--lora-modules", f"attention={case.adapters['attention']}"),
        environment={
            "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        },
        fork=True,
    )
    assert summary(server) == WARM
    prompt = random_tokens(40, seed=5)

    def load(name, path, **options):
        body = {"lora_name": name, "lora_path": str(path), **options}
        return server.post("/v1/load_lora_adapter", body)

    def check(*names):
        bodies = [
            {
                "prompt": prompt,
                "model": name or "model",
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            for name in names
        ]
        answers = server.complete_all(bodies)
        found = [answer["choices"][0]["token_ids"] for answer in answers]
        assert found == [case.greedy(name, prompt) for name in names], names

    assert server.post("/v1/completions", {"model": "mlp", "prompt": prompt}).status_code == 404
    check("attention", "")
    assert load("mlp", case.adapters["mlp"]).status_code == 200
    check("attention", "", "mlp")
    assert load("full", case.adapters["full"]).status_code == 200
    check("full", "attention", "mlp", "")

    # What cannot be loaded is told, and changes nothing.
    assert load("nowhere", case.adapters["mlp"].parent / "nowhere").status_code == 404
    wide = build_adapter(
        server.log_path.parent / "wide", case.model, ["q_proj"], rank=32, alpha=32, seed=9
    )
    answer = load("wide", wide)
    assert answer.status_code == 500
    assert "LoRA rank 32 is greater than max_lora_rank 16" in answer.text
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "mlp"}).status_code == 200
    assert server.post("/v1/completions", {"model": "mlp", "prompt": prompt}).status_code == 404
    check("full", "", "attention")

    # Its files are read when it is loaded, and by no step.
    copied = shutil.copytree(case.adapters["full"], server.log_path.parent / "copied")
    assert load("full", copied, load_inplace=True).status_code == 200
    shutil.rmtree(copied)
    check("full", "attention")


def adapt_every_layer(llm):
    """What a start without --lora-target-modules does."""
    from vllm_neuron.vllm.lora import LoraAdapters

    runner = model_runner(llm)
    runner.vllm_config.lora_config.target_modules = None
    LoraAdapters(runner.vllm_config, runner.model, runner.execution)


def test_experts_have_no_adapters_but_attention_has(
    checkpoint: Callable[[str], Path], tmp_path: Path
):
    model = checkpoint("mixtral")
    adapter = build_adapter(
        tmp_path / "adapter", model, ["q_proj", "v_proj"], rank=8, alpha=16, seed=1
    )
    merged = merge(tmp_path / "merged", model, adapter)
    prompt = random_tokens(30, seed=3)
    targets = {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    with Engine(model, CPU_MODE, cache_root=tmp_path, **OPTIONS, **targets) as engine:
        requests = [(prompt, "adapter", 1, str(adapter)), (prompt, "", 0, "")]
        found = engine.call(generate, requests, 20)
        with pytest.raises(EngineError, match="--enable-lora for the experts of Mixtral"):
            engine.call(adapt_every_layer)
    right = [models.greedy(folder, [prompt], tokens=20)[0] for folder in (merged, model)]
    assert [answer for answer, _ in found] == right
