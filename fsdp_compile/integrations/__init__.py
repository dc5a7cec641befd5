"""Other libraries' names for training, filled by fsdp_compile; each file imports its library, and nothing else does."""
