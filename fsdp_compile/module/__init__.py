"""The change of a module: its parameters become shards, reads of them gather, and it gains methods."""
