"""Benchmarks of marq and, in the same run, of its peers. `python -m bench --help`; figures are in README.md."""
