"""From a captured graph to a module that a compiler takes, one file per route."""
