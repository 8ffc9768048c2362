"""Settings come from the environment or a file, and a wrong one is one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from app import settings as settings_module
from app.settings import Settings, as_markdown, is_explicit, load, variable
from marq.errors import SettingError


def error_with(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError) as caught:
        load()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_need_nothing_to_be_set() -> None:
    settings = load()
    assert settings.kafka is None
    assert (settings.partitions, settings.web_port, settings.web_host) == (8, 9324, "127.0.0.1")
    assert settings.memory_bytes == 256 * 1024 * 1024


def test_name_prefixes_all_topics_that_are_not_named_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_NAME", "shop")
    monkeypatch.setenv("MARQ_POISON_TOPIC", "bad-ones")
    settings = load()
    assert (settings.queue_topic, settings.markers_topic) == ("shop.queue", "shop.markers")
    assert (settings.poison_topic, settings.queues_topic) == ("bad-ones", "shop.queues")


def test_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "marq.toml"
    file.write_text('partitions = 4\nname = "shop"\nhandlers = ["a", "b.c"]\n')
    monkeypatch.setenv("MARQ_CONFIG", str(file))
    monkeypatch.setenv("MARQ_PARTITIONS", "5")
    settings = load()
    assert (settings.partitions, settings.name, settings.handlers) == (5, "shop", ("a", "b.c"))


def test_handlers_are_a_comma_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_HANDLERS", "shop.orders, shop.mail,")
    assert load().handlers == ("shop.orders", "shop.mail")


def test_an_empty_variable_is_as_if_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_KAFKA", "")
    assert load().kafka is None


def test_explicit_settings_are_told_from_defaults_even_with_the_same_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_PARTITIONS", "8")
    settings = load()
    assert is_explicit(settings, "partitions")
    assert not is_explicit(settings, "web_port")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("MARQ_PARTITIONS", "many", "integer"),
        ("MARQ_PARTITIONS", "0", "greater than or equal to 1"),
        ("MARQ_WEB_PORT", "70000", "65535"),
        ("MARQ_KAFKA", "localhost:9092", "kafka://host:port"),
        ("MARQ_NAME", "my shop", "letters, digits"),
        ("MARQ_LOG_LEVEL", "loud", "'INFO'"),
        ("MARQ_AUTO_CREATE", "maybe", "boolean"),
        ("MARQ_BACKOFF_MAX_MS", "5", "MARQ_BACKOFF_MS"),
        ("MARQ_QUEUES_TOPIC", "marq.queue", "MARQ_QUEUE_TOPIC"),
        ("MARQ_KAFKA_CA_FILE", "/does/not/exist", "file"),
        ("MARQ_DEAD_LETTER_TOPIC", "dead", "MARQ_QUEUE_ID"),
        ("MARQ_WEB_URL", "worker:9324", "http://"),
        ("MARQ_SQS_ACCOUNT", "12345678901", "12 digits"),
        ("MARQ_SQS_ACCOUNT", "my-account-x", "12 digits"),
    ],
)
def test_a_bad_value_names_the_variable_the_value_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    message = error_with(monkeypatch, **{name: value})
    assert message.startswith(f"{name}={value!r} is not allowed")
    assert allowed in message


def test_an_unknown_variable_suggests_the_one_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_with(monkeypatch, MARQ_PARTITION="4")
    assert message == "unknown environment variable MARQ_PARTITION; did you mean MARQ_PARTITIONS?"


def test_a_variable_of_an_earlier_version_says_what_it_is_called_now(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_with(monkeypatch, MARQ_HOLD_MS="500")
    assert message == "unknown environment variable MARQ_HOLD_MS; it is called MARQ_PERSIST_AFTER_MS now"


def test_an_unknown_key_in_the_file_suggests_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "marq.toml"
    file.write_text("checkpoint = 1000\n")
    message = error_with(monkeypatch, MARQ_CONFIG=str(file))
    assert "unknown setting 'checkpoint'" in message
    assert "checkpoint_ms" in message


def test_a_file_that_is_missing_or_broken_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "marq.toml"
    assert str(file) in error_with(monkeypatch, MARQ_CONFIG=str(file))
    file.write_text("= 4")
    assert "not valid TOML" in error_with(monkeypatch, MARQ_CONFIG=str(file))


def test_the_password_never_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_with(monkeypatch, MARQ_KAFKA_PASSWORD="hunter2")
    assert "hunter2" not in message
    assert "MARQ_KAFKA_USERNAME" in message
    monkeypatch.setenv("MARQ_KAFKA_USERNAME", "ann")
    settings = load()
    assert "hunter2" not in f"{settings!r} {settings} {settings.model_dump_json()}"


def test_a_user_name_needs_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "MARQ_KAFKA_PASSWORD" in error_with(monkeypatch, MARQ_KAFKA_USERNAME="ann")


def test_settings_do_not_change_after_loading() -> None:
    with pytest.raises(ValidationError):
        load().partitions = 3  # type: ignore[misc]


def test_the_reference_table_has_every_setting_with_a_description() -> None:
    table = as_markdown()
    for name, field in Settings.model_fields.items():
        assert f"| `{variable(name)}` |" in table
        assert field.description, name
    assert settings_module.PREFIX == "MARQ_"


def test_the_documentation_has_the_table_of_settings_as_it_is_printed() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert as_markdown().strip() in text


def test_a_password_in_an_address_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_KAFKA", "kafka://marq:hunter2@broker:9092")
    with pytest.raises(SettingError, match="MARQ_KAFKA") as caught:
        load()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["secret", "secret_previous"])
@pytest.mark.parametrize(
    "value", ["", "x", "hunter2" * 4, " " * 40, "hunter2" + " " * 40, "\\u0000" * 40, "hunter2" * 5 + "\\n"]
)
def test_a_secret_that_can_be_guessed_is_refused_and_not_shown(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "marq.toml"
    file.write_text(f'secret = "{"s" * 32}"\n{name} = "{value}"\n' if name != "secret" else f'secret = "{value}"\n')
    monkeypatch.setenv("MARQ_CONFIG", str(file))
    with pytest.raises(SettingError, match=rf"MARQ_{name.upper()} is not allowed.* 32") as caught:
        load()
    assert "hunter2" not in str(caught.value)


def test_a_previous_secret_needs_one_that_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_SECRET_PREVIOUS", "s" * 32)
    with pytest.raises(SettingError, match="MARQ_SECRET_PREVIOUS is not allowed: needs MARQ_SECRET"):
        load()
