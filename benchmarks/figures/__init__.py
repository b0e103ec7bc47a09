"""One module a figure: what is measured, and the tables that show it."""

from benchmarks.figures import flush, latency, memory, sizes, slots, slow_model, startup, throughput, workers

#: in the order in which they are measured and shown
FIGURES = (throughput, latency, slots, slow_model, sizes, workers, memory, startup, flush)
