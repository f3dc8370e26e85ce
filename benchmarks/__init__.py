"""Measurements beside the peers, each a command: `python -m benchmarks.<name>`."""
