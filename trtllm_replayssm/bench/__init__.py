"""Benchmarks of engines: requests with their latencies, decode steps by batch, and where a step's time goes."""
