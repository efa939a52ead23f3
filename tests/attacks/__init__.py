"""Attacks on caches and containers: one per file, shown working on others where it does."""
