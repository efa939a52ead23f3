"""What a restart need not do again: trace records and compiled graphs."""
