"""All settings of marq.

A setting is an environment variable (`MARQ_PARTITIONS=16`) or a key of the TOML file that `MARQ_CONFIG` names
(`partitions = 16`). The environment wins. `python -m app.settings` prints the reference table.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from marq.core.policies import LEASE_MAX_MS, LEASE_MIN_MS
from marq.core.settings import check_declared
from marq.errors import MarqError, SettingError

PREFIX = "MARQ_"
CONFIG_VARIABLE = "MARQ_CONFIG"

#: Variables with our prefix that are not settings: the file of settings, and what the tests read.
_NOT_SETTINGS = (CONFIG_VARIABLE, "MARQ_TEST_")
#: Variables that the command `marq` reads.
_OF_THE_COMMAND = ("MARQ_URL", "MARQ_KEY_FILE", "MARQ_CA_FILE")

#: Names of settings in earlier versions, and their names now.
_RENAMED = {"hold_ms": "persist_after_ms"}

#: Fewest characters of a secret: shorter ones can be guessed.
SECRET_MIN = 32

MIB = 1024 * 1024

_KAFKA_URL = re.compile(r"kafka://[^/,\s:@]+:\d{1,5}(,[^/,\s:@]+:\d{1,5})*")


def _comma_list(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _is_no_blank(secret: SecretStr) -> SecretStr:
    text = secret.get_secret_value()
    if len(text.strip()) < SECRET_MIN or not text.isprintable():
        raise ValueError(f"needs {SECRET_MIN} characters, without blanks at its ends, and no control characters")
    return secret


TopicName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
Count = Annotated[int, Field(ge=1)]
Milliseconds = Annotated[int, Field(ge=1)]
Lease = Annotated[int, Field(ge=LEASE_MIN_MS, le=LEASE_MAX_MS)]
Secret = Annotated[SecretStr, Field(min_length=SECRET_MIN), AfterValidator(_is_no_blank)]
Port = Annotated[int, Field(ge=0, le=65535)]


def _named(suffix: str) -> Any:
    return lambda data: f"{data['name']}.{suffix}"


class Settings(BaseSettings):
    """The settings of one process; they never change after `load()`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    # Kafka
    kafka: str | None = Field(
        None,
        description="Kafka to use, `kafka://host:port[,host:port]`. Without it, the embedded broker whose address "
        "is in the data folder.",
    )
    kafka_username: str | None = Field(None, description="SASL user name.")
    kafka_password: SecretStr | None = Field(None, description="SASL password.")
    kafka_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "SCRAM-SHA-512", description="SASL mechanism, used if a user name is set."
    )
    kafka_tls: bool = Field(False, description="Use TLS to Kafka.")
    kafka_ca_file: Path | None = Field(
        None, description="Certificates to trust (PEM) instead of the system's; implies `MARQ_KAFKA_TLS`."
    )
    kafka_wait_ms: Annotated[int, Field(ge=0)] = Field(
        60_000, description="Time that a worker waits at its start for a Kafka that does not answer yet."
    )
    kafka_without: Annotated[
        tuple[Literal["Delete", "DescribeConfigs"], ...], NoDecode, BeforeValidator(_comma_list)
    ] = Field(
        (),
        description="Permissions that Kafka does not give, and that marq is to do without, at a price: `Delete`, "
        "`DescribeConfigs`.",
    )
    session_timeout_ms: Annotated[int, Field(ge=6000, le=1_800_000)] = Field(
        10_000, description="Silence after which a worker counts as dead and others get its partitions."
    )

    # Topics
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")] = Field(
        "marq", description="Prefix of topics, changelogs and consumer group: several installations can share a Kafka."
    )
    queue_topic: TopicName = Field(default_factory=_named("queue"), description="Topic of the messages.")
    markers_topic: TopicName = Field(default_factory=_named("markers"), description="Topic of the progress markers.")
    poison_topic: TopicName = Field(
        default_factory=_named("poison"), description="Topic that gets a copy of records that can't be read."
    )
    queues_topic: TopicName = Field(
        default_factory=_named("queues"), description="Compacted topic of the queues' settings."
    )
    queue_id: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None,
        description="Topic mode: `MARQ_QUEUE_TOPIC` is a topic of your own, and one queue of this name "
        "as a whole. marq never writes to it.",
    )
    dead_letter_topic: TopicName | None = Field(
        None, description="Topic mode: where dead letters go. Without it, none are made."
    )
    deleted_unread: Literal["continue", "stop"] = Field(
        "continue",
        description="Topic mode: what happens where Kafka has deleted records before they were read. `continue`: the "
        "partition goes on behind them, and they are counted and named. `stop`: it is not served until `repair`.",
    )
    partitions: Annotated[int, Field(ge=1, le=10_000)] = Field(
        8, description="Partitions of the topics when they are created; fixed for life."
    )
    replication: Annotated[int, Field(ge=1, le=32)] | None = Field(
        None, description="Replicas of each partition of topics that marq creates. By default 3, or as many as brokers."
    )
    auto_create: bool = Field(True, description="A message to an unknown queue creates the queue, with defaults.")

    # The worker
    web_host: Annotated[str, Field(min_length=1)] = Field("127.0.0.1", description="Address that HTTP listens on.")
    web_port: Port = Field(
        9324,
        description="Port of HTTP; 0 takes any free one. If it is not set and taken by another worker of the same "
        "data folder, the next free one.",
    )
    web_shared_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None,
        description="Port that several workers of one machine listen on together, each besides one of its own, which "
        "takes the place of the port in `MARQ_WEB_URL`. `up --workers` and `worker --processes` set it.",
    )
    data_dir: Path = Field(Path("./data"), description="Folder of local tables and of the embedded broker.")
    cache_dir: Path = Field(Path("~/.cache/marq"), description="Folder of downloads (the embedded broker's jars).")
    handlers: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_comma_list)] = Field(
        (), description="Python modules with handlers, comma-separated; a worker imports them."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Lowest level that is logged.")
    log_format: Literal["text", "json"] = Field("text", description="How a worker writes its log: lines, or JSON.")

    # HTTP
    secret: Secret | None = Field(
        None,
        description="Secret that all workers share, of 32 characters or more: it signs receipts and the calls between "
        "workers. Without it, one is created and stored in the queues topic.",
    )
    secret_previous: Secret | None = Field(
        None, description="Another secret that is accepted while `MARQ_SECRET` is being replaced."
    )
    queues: dict[str, dict[str, Any]] = Field(
        {},
        description="Queues to create or update when a worker starts: in the TOML file, a table "
        "`[queues.NAME]` with the settings of the queue.",
    )
    web_url: Annotated[str, Field(pattern=r"^https?://[^/?#@\s]{1,300}$")] | None = Field(
        None,
        description="Address at which other workers reach this one, and nothing else. By default `MARQ_WEB_HOST` "
        "and the port.",
    )
    web_tls_certificate_file: Path | None = Field(
        None, description="Certificate chain (PEM) of HTTP; with it, HTTP is HTTPS."
    )
    web_tls_key_file: Path | None = Field(None, description="Private key (PEM) of that certificate.")
    web_tls_ca_file: Path | None = Field(
        None, description="Certificates (PEM) that workers trust when they call each other; default: the system's."
    )
    keys: SecretStr | None = Field(
        None,
        description="Keys of HTTP, a comma-separated list of `KEY`, or `KEY=PERMISSIONS:QUEUES` (see the "
        "documentation). Without any, HTTP listens on loopback only.",
    )
    max_body_bytes: Annotated[int, Field(ge=64 * 1024)] = Field(
        32 * MIB, description="Largest request that HTTP accepts."
    )
    max_connections: Count = Field(
        8192,
        description="Connections of clients that a worker accepts, if the system's limit of open files allows them.",
    )
    max_connections_per_address: Count = Field(
        1024,
        description="Connections of one address (of an IPv6 network of 64 bits). Behind a proxy all clients have the "
        "address of the proxy: raise it there.",
    )

    # Amazon SQS
    sqs_limits: Literal["strict", "relaxed"] = Field(
        "strict",
        description="`strict`: the limits of Amazon SQS. `relaxed`: what marq can do, e.g. delays of a year, "
        "visibility timeouts of a week, 1,000 messages in a receive.",
    )
    sqs_account: Annotated[str, Field(pattern=r"^[0-9]{12}$")] = Field(
        "000000000000",
        description="Account in queue URLs and ARNs, 12 digits. Set it once, before clients keep URLs and ARNs.",
    )

    # Memory and progress
    memory_bytes: Annotated[int, Field(ge=MIB)] = Field(
        256 * MIB,
        description="Payload that a worker may hold in memory, with large answers until they are sent; reading ahead "
        "pauses above it.",
    )
    read_ahead_bytes: Annotated[int, Field(ge=64 * 1024)] = Field(
        8 * MIB, description="Payload that a partition reads ahead of its receivers."
    )
    window_offsets: Count = Field(
        100_000, description="A message this far behind the newest read is written to the table with its payload."
    )
    persist_after_ms: Milliseconds = Field(
        10_000, description="A message unfinished for this long is written to the table with its payload."
    )
    checkpoint_ms: Annotated[int, Field(ge=100)] = Field(
        2_000,
        description="Time between checkpoints of a partition; longer where a worker would make more than 50 a second.",
    )
    step_timeout_ms: Annotated[int, Field(ge=1000)] = Field(
        30_000, description="Time for Kafka to acknowledge a step of a checkpoint; a worker that exceeds it stops."
    )
    retention_history_ms: Annotated[int, Field(ge=0)] = Field(
        86_400_000, description="Time for which records of finished messages are kept in our topics."
    )

    # Delivery, where a queue does not say otherwise
    visibility_timeout_ms: Lease = Field(
        30_000, description="Time that a receiver has for a message before it is delivered again."
    )
    max_receives: Count | None = Field(
        None, description="Deliveries before a message becomes a dead letter. Unset: no limit (10 for handlers)."
    )
    backoff_ms: Milliseconds = Field(1_000, description="Delay after the first failure of a handler; then it doubles.")
    backoff_max_ms: Milliseconds = Field(60_000, description="Longest delay after a failure of a handler.")
    stop_ms: Annotated[int, Field(ge=0, le=3_600_000)] = Field(
        3_000,
        description="Time that calls of handlers get to finish when the worker stops; then they are cancelled, and "
        "their messages given back. Whatever stops the worker has to wait 7 s longer before it kills it.",
    )

    @property
    def bootstrap_servers(self) -> list[str] | None:
        """`host:port` of each broker in `kafka`; None if that is not set."""
        return self.kafka.removeprefix("kafka://").split(",") if self.kafka else None

    @property
    def url_host(self) -> str:
        """`web_host` as in a URL."""
        return f"[{self.web_host}]" if ":" in self.web_host else self.web_host

    def url_at(self, port: int) -> str:
        """The URL of a port of this machine, for a user of this machine."""
        scheme = "http" if self.web_tls_certificate_file is None else "https"
        return f"{scheme}://{'localhost' if self.web_host == '127.0.0.1' else self.url_host}:{port}"

    @property
    def archive_group(self) -> str:
        """Consumer group whose offsets are the archive's positions: retention keeps what is not archived yet."""
        return f"{self.name}.archive"

    @property
    def uses_tls(self) -> bool:
        return self.kafka_tls or self.kafka_ca_file is not None

    @field_validator("kafka")
    @classmethod
    def _kafka_is_a_url(cls, value: str | None) -> str | None:
        if value is not None and not _KAFKA_URL.fullmatch(value):
            raise ValueError("must be kafka://host:port[,host:port]")
        return value

    @field_validator("log_level", "kafka_mechanism", mode="before")
    @classmethod
    def _upper(cls, value: object) -> object:
        return value.upper() if isinstance(value, str) else value

    @field_validator("queues")
    @classmethod
    def _queues_are_possible(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        try:
            check_declared(value.items())
        except MarqError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator(
        "data_dir", "cache_dir", "kafka_ca_file", "web_tls_certificate_file", "web_tls_key_file", "web_tls_ca_file"
    )
    @classmethod
    def _home(cls, value: Path | None) -> Path | None:
        return value.expanduser() if value is not None else None

    @field_validator("markers_topic", "poison_topic", "queues_topic", "dead_letter_topic")
    @classmethod
    def _topics_differ(cls, value: str | None, info: ValidationInfo) -> str | None:
        for other in ("queue_topic", "markers_topic", "poison_topic", "queues_topic"):
            if other != info.field_name and value is not None and info.data.get(other) == value:
                raise ValueError(f"must differ from {PREFIX}{other.upper()}")
        return value

    @field_validator("dead_letter_topic")
    @classmethod
    def _only_in_topic_mode(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("queue_id") is None:
            raise ValueError("has a meaning only in topic mode: set MARQ_QUEUE_ID too")
        return value

    @field_validator("max_receives")
    @classmethod
    def _has_a_place_for_dead_letters(cls, value: int | None, info: ValidationInfo) -> int | None:
        topic_mode = info.data.get("queue_id") is not None
        if value is not None and topic_mode and info.data.get("dead_letter_topic") is None:
            raise ValueError("needs MARQ_DEAD_LETTER_TOPIC in topic mode: there is no place for dead letters")
        return value

    @field_validator("kafka_password")
    @classmethod
    def _password_has_a_user(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is not None and info.data.get("kafka_username") is None:
            raise ValueError("needs MARQ_KAFKA_USERNAME")
        return value

    @field_validator("secret_previous")
    @classmethod
    def _previous_has_a_next(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is not None and "secret" in info.data and info.data["secret"] is None:
            raise ValueError("needs MARQ_SECRET")
        return value

    @model_validator(mode="after")
    def _user_has_a_password(self) -> Self:
        if self.kafka_username is not None and self.kafka_password is None:
            raise SettingError("MARQ_KAFKA_USERNAME is set without MARQ_KAFKA_PASSWORD; set both or none")
        return self

    @field_validator("kafka_ca_file", "web_tls_certificate_file", "web_tls_key_file", "web_tls_ca_file")
    @classmethod
    def _file_exists(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError("must be a file that exists")
        return value

    @field_validator("backoff_max_ms")
    @classmethod
    def _not_below_first(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("backoff_ms", 0):
            raise ValueError(f"must be at least MARQ_BACKOFF_MS ({info.data['backoff_ms']})")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = InitSettingsSource(settings_cls, init_kwargs=_read_file())
        return init_settings, env_settings, file


def load() -> Settings:
    """The settings of this process, from its environment and the file that `MARQ_CONFIG` names.

    Raises:
        SettingError: names the variable, its value, and what is allowed, in one line.
    """
    _refuse_unknown_variables()
    try:
        return Settings()
    except ValidationError as error:
        raise SettingError(_explain(error.errors()[0])) from None


def is_explicit(settings: Settings, name: str) -> bool:
    """True if the user set a setting, so that it does not have its default."""
    return name in settings.model_fields_set


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def _read_file() -> dict[str, Any]:
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        return {}
    try:
        values = tomllib.loads(Path(path).expanduser().read_text())
    except OSError as error:
        raise SettingError(f"{CONFIG_VARIABLE}={path!r} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{CONFIG_VARIABLE}={path!r} is not valid TOML: {error}") from None
    for key in values:
        if key not in Settings.model_fields:
            raise SettingError(f"unknown setting {key!r} in {path}{_suggestion(key, list(Settings.model_fields))}")
    return values


def _refuse_unknown_variables() -> None:
    known = [variable(name) for name in Settings.model_fields]
    for name in sorted(os.environ):
        if not name.upper().startswith(PREFIX) or name.upper().startswith(_NOT_SETTINGS):
            continue
        if name in _OF_THE_COMMAND:
            continue
        if name.upper() not in known:
            raise SettingError(f"unknown environment variable {name}{_suggestion(name, known)}")


def _suggestion(name: str, known: list[str]) -> str:
    plain = name.upper().removeprefix(PREFIX).lower()
    if plain in _RENAMED:
        return f"; it is called {_RENAMED[plain] if name == plain else variable(_RENAMED[plain])} now"
    close = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(name.upper(), known, n=1)
    return f"; did you mean {close[0]}?" if close else "; `python -m app.settings` lists all settings"


#: The description of settings with a pattern of their own, for error messages.
_PATTERNS = {
    "sqs_account": "it has to have 12 digits",
    "web_url": "it has to be http:// or https://, a host and a port, and no path",
}


def _explain(error: ErrorDetails) -> str:
    name = str(error["loc"][0])
    field = Settings.model_fields[name]
    reason = error["msg"].removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        reason = _PATTERNS.get(name, "only letters, digits, '.', '_' and '-' are allowed, and not too many")
    shown = "" if _is_secret(field) else f"={_given_value(name, error)!r}"
    return f"{variable(name)}{shown} is not allowed: {reason[0].lower()}{reason[1:]}"


def _given_value(name: str, error: ErrorDetails) -> object:
    value = next((value for key, value in os.environ.items() if key.upper() == variable(name)), None)
    if value is None:
        value = _read_file().get(name, error["input"])
    # a password written into an address must not get into a log
    return re.sub(r"//[^/@]*@", "//…@", value) if isinstance(value, str) else value


def _is_secret(field: FieldInfo) -> bool:
    return "SecretStr" in str(field.annotation)


# -- the reference table ------------------------------------------------------------------------------


def as_markdown() -> str:
    """All settings as a Markdown table, for the documentation."""
    rows = ["| variable | default | unit | what it is |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        rows.append(f"| `{variable(name)}` | {_default_of(field)} | {_unit_of(name)} | {field.description} |")
    return "\n".join(rows)


def _default_of(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        value: object = field.default_factory({"name": "<name>"})  # type: ignore[call-arg, misc]
    else:
        value = field.default
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    return f"`{value}`"


def _unit_of(name: str) -> str:
    for suffix, unit in (("_ms", "ms"), ("_bytes", "bytes"), ("_offsets", "offsets")):
        if name.endswith(suffix):
            return unit
    return ""


if __name__ == "__main__":
    print(as_markdown())
