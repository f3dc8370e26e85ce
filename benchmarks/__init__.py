"""Measurements of shardfn and its peers; each is a command: `python -m benchmarks.<name>`."""
