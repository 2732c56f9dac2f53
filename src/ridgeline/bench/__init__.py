"""How fast a model runs on this machine, and how fast it could: workloads, measurements, limits. See docs/metrics.md."""
