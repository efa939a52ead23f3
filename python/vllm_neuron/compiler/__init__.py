"""From a lowered module to a NEFF: the compiler interface and its implementations."""
