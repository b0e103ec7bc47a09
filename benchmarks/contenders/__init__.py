"""The programs that are measured against each other. Each runs as a process of its own, told what to do by BENCH_*."""
