"""Our worker measured against other ways of doing the same, on one machine, in one run: `python -m benchmarks.run`."""
