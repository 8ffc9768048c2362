"""Benchmarks run seldom: that they can run at all is looked at here."""

from __future__ import annotations

from click.testing import CliRunner


def test_every_benchmark_finds_what_it_imports() -> None:
    from bench.__main__ import bench

    result = CliRunner().invoke(bench, ["--help"])
    assert result.exit_code == 0, result.output
    assert "overload" in result.output
