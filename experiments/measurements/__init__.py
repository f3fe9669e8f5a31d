"""What `python -m experiments.bench` measures: speed beside peers, the loop's overhead, startup, determinism."""
