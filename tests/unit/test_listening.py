"""A worker listens where its settings say, whatever Faust's options say, and without keys on loopback only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app import worker
from app.faust_worker import OPTIONS_OF_FAUST
from app.settings import Settings
from app.worker import build
from gateway.listening import require_loopback
from marq.errors import SettingError
from tests.unit.http_lab import SECRET, run, serving

KEY = "a-key-of-enough-length"
ROOT = Path(__file__).resolve().parents[2]
#: What Faust reads by itself.
VARIABLES = {
    "WEB_BIND": "0.0.0.0",
    "F_WEB_BIND": "0.0.0.0",
    "FAUST_WEB_BIND": "0.0.0.0",
    "WEB_HOST": "0.0.0.0",
    "WEB_PORT": "1",
    "WEB_TRANSPORT": "unix:///tmp/x",
    "NODE_CANONICAL_URL": "http://evil.example",
    "BROKER_URL": "kafka://evil.example",
    "APP_DATADIR": "/tmp/x",
    "APP_WEB_TABLES_ENABLED": "1",
    "APP_WEB_METRICS_ENABLED": "1",
}


def test_variables_of_faust_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    conf = build(Settings(data_dir=tmp_path)).conf

    assert (conf.web_bind, conf.web_host, conf.web_transport.scheme) == ("127.0.0.1", "127.0.0.1", "tcp")
    assert "evil" not in f"{conf.canonical_url} {conf.broker}"
    assert str(conf.datadir) == str(tmp_path)
    assert not conf.web_tables_enabled
    assert not conf.web_metrics_enabled


def test_a_worker_listens_where_its_settings_say_whatever_faust_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = build

    def told(settings: Settings) -> worker.WorkerApp:
        app = original(settings)
        app.conf.web_bind = "0.0.0.0"
        return app

    monkeypatch.setattr("tests.unit.http_lab.build", told)

    async def test() -> None:
        async with serving(tmp_path) as http:
            assert [address[0] for address in http.app.web._runner.addresses] == ["127.0.0.1"]

    run(test)


def test_what_is_bound_counts_not_how_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is somewhere else by the time that it is listened on."""
    moved = Settings(data_dir=tmp_path, secret=SECRET, web_host="0.0.0.0")

    async def test() -> None:
        with pytest.raises(SettingError, match="lets others in"):
            async with serving(tmp_path, web_host=moved.web_host):
                pass
        async with serving(tmp_path, web_host=moved.web_host, keys=KEY) as http:
            assert [address[0] for address in http.app.web._runner.addresses] == ["0.0.0.0"]

    run(test)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    require_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "evil.localhost"])
def test_anything_else_does(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = socket.getaddrinfo

    def resolve(name: str, *rest: object, **options: object) -> object:
        # a host name that looks local, but resolves elsewhere
        return asked("192.0.2.1" if name == "evil.localhost" else name, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(SettingError, match="lets others in: set MARQ_KEYS"):
        require_loopback(host)


@pytest.mark.parametrize("host", ["::1", "::"])
def test_an_address_of_ipv6_has_brackets_in_a_url(tmp_path: Path, host: str) -> None:
    settings = Settings(data_dir=tmp_path, web_host=host, secret=SECRET, keys="a-key-of-enough-length")

    assert build(settings).settings.url_host == f"[{host}]"


def test_a_host_that_is_none_is_named() -> None:
    with pytest.raises(SettingError, match="is not an address to listen on"):
        require_loopback("a name with blanks")


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        (["--web-bind", "0.0.0.0"], "MARQ_WEB_HOST"),
        (["--web-host", "0.0.0.0"], "MARQ_WEB_HOST"),
        (["--web-port", "80"], "MARQ_WEB_PORT"),
        (["--web-transport", "unix:///tmp/x"], "leave it out"),
        (["--without-web"], "leave it out"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_of_faust_that_contradict_the_settings_are_refused(
    tmp_path: Path, option: list[str], instead: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "app", "worker", *option],
        cwd=ROOT,
        env=os.environ | {"MARQ_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"marq: {option[0]} is an option of Faust's")
    assert instead in line


def test_every_option_of_faust_about_the_web_server_is_looked_at() -> None:
    from faust.cli.worker import worker as command

    names = set()
    for decorator in command.worker_options:

        def function() -> None:
            pass

        decorator(function)
        names |= {parameter.name for parameter in function.__click_params__}  # type: ignore[attr-defined]
    assert names <= set(OPTIONS_OF_FAUST)
