"""Measurements next to the peers, each a command: `python -m benchmarks.<name>`."""
