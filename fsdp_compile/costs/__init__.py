"""Costs: what a rewritten graph takes of a described machine, in seconds and in bytes."""
