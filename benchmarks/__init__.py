"""Benchmarks: each figure has a baseline that was measured in the same run.

``python -m benchmarks.bench_pair`` runs one of them, ``make bench`` all; `benchmarks.harness` holds what they share.
"""
