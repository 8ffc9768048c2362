"""Benchmarks of marq and, beside it in the same run, of its peers. `python -m bench --help`; figures in README.md."""
