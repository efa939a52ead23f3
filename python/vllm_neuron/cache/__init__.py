"""What a restart need not do again: trace records and compiled graphs."""

from vllm_neuron.cache.promotion import save_cache

__all__ = ["save_cache"]
