"""The command line, `fsdp-compile`."""
