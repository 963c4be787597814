"""Benchmarks: each a module that prints a table and, with `--json FILE`, writes its rows."""
