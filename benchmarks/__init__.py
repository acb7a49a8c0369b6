"""Benchmarks for maintainers: each measures one claim of docs/benchmarks.md beside a rival or a bound."""
