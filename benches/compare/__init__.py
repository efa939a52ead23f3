"""Side-by-side measurements: what others do and what this does, interleaved in one process."""
