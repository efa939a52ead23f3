"""Load and run NEFFs: the runtime interface and its implementations."""
