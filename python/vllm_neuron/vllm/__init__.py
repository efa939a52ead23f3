"""The vLLM platform plugin: platform, worker, model runner, attention, buckets."""
