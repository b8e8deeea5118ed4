"""Small real tasks, every system on one budget: `python -m benchmarks.accuracy`."""
