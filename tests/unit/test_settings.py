"""Settings say what is wrong with which variable, and never show what may be a password."""

from __future__ import annotations

import pickle
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from redis.connection import SSLConnection

from consumer.settings import ConsumerSettings
from outbox import jobs
from outbox.address import RedisAddress
from outbox.errors import SettingsError
from outbox.settings import (
    RelaySettings,
    Settings,
    check_schema,
    database_address,
    database_url_from_environment,
    redis_address,
    unknown_variables,
)

DATABASE = "postgresql://app@localhost/app"
REDIS = "redis://localhost/0"
PASSWORD = "S3cr3t!%40"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.upper().startswith(("OUTBOX_", "CONSUMER_")) or name in ("DATABASE_URL", "REDIS_URL"):
            monkeypatch.delenv(name)


def settings(**values: Any) -> RelaySettings:
    return RelaySettings(**{"database_url": DATABASE, "redis_url": REDIS, **values})


@pytest.mark.parametrize(
    ("values", "variable", "rule"),
    [
        ({"batch_rows": 0}, "OUTBOX_BATCH_ROWS", "greater than or equal to 1"),
        ({"batch_rows": "many"}, "OUTBOX_BATCH_ROWS", "integer"),
        ({"batch_bytes": 1}, "OUTBOX_BATCH_BYTES", "1024"),
        ({"poll_min_seconds": 0}, "OUTBOX_POLL_MIN_SECONDS", "greater than 0"),
        ({"poll_min_seconds": 2.0, "poll_max_seconds": 1.0}, "OUTBOX_POLL_MIN_SECONDS", "OUTBOX_POLL_MAX_SECONDS"),
        ({"partition_rows": 1}, "OUTBOX_PARTITION_ROWS", "1000"),
        ({"wait_aof": "yes"}, "OUTBOX_WAIT_AOF", "'no', 'local' or 'all'"),
        ({"wait_aof": "all"}, "OUTBOX_WAIT_AOF", "OUTBOX_WAIT_REPLICAS"),
        ({"wait_replicas": -1}, "OUTBOX_WAIT_REPLICAS", "greater than or equal to 0"),
        ({"redis_timeout_seconds": -1}, "OUTBOX_REDIS_TIMEOUT_SECONDS", "greater than 0"),
        ({"key_prefix": "a b"}, "OUTBOX_KEY_PREFIX", "pattern"),
        ({"key_prefix": "{a}"}, "OUTBOX_KEY_PREFIX", "pattern"),
        ({"schema_name": "a;b"}, "OUTBOX_SCHEMA", "letters"),
        ({"schema_name": "pg_toast"}, "OUTBOX_SCHEMA", "pg_"),
        ({"lanes": "payments"}, "OUTBOX_LANES", "payments=8,orders=2"),
        ({"lanes": "payments=many"}, "OUTBOX_LANES", "payments=8,orders=2"),
        ({"lanes": "payments=0"}, "OUTBOX_LANES", "1 to 1024"),
        ({"lanes": {"payments": 1025}}, "OUTBOX_LANES", "1 to 1024"),
        ({"lanes": {"pay:ments": 2}}, "OUTBOX_LANES", "topic"),
        ({"lanes": "queue/mail=2"}, "OUTBOX_LANES", "a queue has no lanes"),
        ({"database_url": "mysql://x"}, "DATABASE_URL", "PostgreSQL address"),
        ({"redis_url": "http://x"}, "REDIS_URL", "Redis address"),
        ({"nonsense": 1}, "nonsense", "not permitted"),
    ],
)
def test_an_error_names_the_variable_and_the_rule(values: dict[str, Any], variable: str, rule: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings(**values)
    assert variable.lower() in str(refused.value).lower()
    assert rule in str(refused.value)


def test_every_missing_variable_is_named() -> None:
    with pytest.raises(SettingsError, match=r"DATABASE_URL: is not set; REDIS_URL: is not set"):
        RelaySettings()
    with pytest.raises(SettingsError, match="DATABASE_URL: is not set"):
        database_url_from_environment()


def test_values_come_from_the_environment_and_arguments_go_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "DATABASE_URL": DATABASE, "REDIS_URL": REDIS, "OUTBOX_BATCH_ROWS": "7", "OUTBOX_LANES": " payments=8, orders=2,",
        "OUTBOX_SCHEMA": "TenantA", "OUTBOX_KEY_PREFIX": "t1:a", "OUTBOX_POLL_MAX_SECONDS": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    from_environment = RelaySettings()
    assert from_environment.batch_rows == 7
    assert from_environment.lanes == {"payments": 8, "orders": 2}
    assert from_environment.schema_name == "TenantA"
    assert from_environment.key_prefix == "t1:a"
    assert from_environment.poll_max_seconds == 0.1
    assert RelaySettings(batch_rows=9).batch_rows == 9
    assert database_url_from_environment() == DATABASE


def test_variables_of_other_programs_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LANES": "a=3", "KEY_PREFIX": "theirs:", "SCHEMA_NAME": "theirs", "BATCH_ROWS": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CONSUMER_BATCH_SIZE", "7")
    addresses = {"database_url": DATABASE, "redis_url": REDIS}
    for found in (RelaySettings(**addresses), ConsumerSettings(**addresses)):
        assert (found.lanes, found.key_prefix, found.schema_name) == ({}, "", "public")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OUTBOX_BATCH_ROW", "OUTBOX_BATCH_ROWS"),
        ("OUTBOX_RETENTION_SECOND", "OUTBOX_RETENTION_SECONDS"),
        ("outbox_lane", "OUTBOX_LANES"),
        ("CONSUMER_CLAIM_SECS", "CONSUMER_CLAIM_SECONDS"),
        ("OUTBOX_CLAIM_SECONDS", "CONSUMER_CLAIM_SECONDS"),
        ("CONSUMER_KEYPREFIX", "OUTBOX_KEY_PREFIX"),
        ("OUTBOX_SOMETHING_ELSE", None),
    ],
)
def test_a_misspelled_variable_is_found_with_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str | None
) -> None:
    monkeypatch.setenv(name, "1")
    assert unknown_variables(RelaySettings, ConsumerSettings) == {name: meant}


def test_no_variable_that_is_read_is_called_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    both: tuple[type[Settings], ...] = (RelaySettings, ConsumerSettings)
    for settings in both:
        for field in settings.model_fields:
            monkeypatch.setenv(settings.variable(field), "1")
    for name in (
        "OUTBOX_DATABASE_URL", "outbox_batch_rows", "CONSUMER_PORT", "OUTBOX_RELAY_SERVICE_HOST", "OUTBOXES",
        "OUTBOX_RELAY_PORT_80_TCP_ADDR", "OUTBOX_SERVICE_PORT_HTTP",
    ):  # fmt: skip
        monkeypatch.setenv(name, "1")
    assert unknown_variables(*both) == {}
    monkeypatch.setenv("CONSUMER_BATCH_SIZES", "1")
    assert unknown_variables(RelaySettings) == {}, "the other side's are not ours to judge"


def test_an_environment_error_names_the_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_SCHEMA", "a;b")
    monkeypatch.setenv("OUTBOX_BATCH_ROWS", "x")
    with pytest.raises(SettingsError, match=r"OUTBOX_SCHEMA: .*; OUTBOX_BATCH_ROWS: "):
        settings()


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        settings().batch_rows = 3


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u@h/d",
        "postgres://u@h/d",
        "postgresql+psycopg://u@h/d",
        "postgresql+asyncpg://u@h/d",
        "host=h user=u dbname=d",
        "postgresql://u@h1,h2:5433/d?target_session_attrs=read-write",
    ],
)
def test_forms_of_a_postgresql_address(url: str) -> None:
    from psycopg.conninfo import conninfo_to_dict

    assert conninfo_to_dict(database_address(url))["dbname"] == "d"


def test_what_follows_an_at_sign_in_a_password_is_no_host_that_errors_show() -> None:
    with pytest.raises(SettingsError, match="%40") as raised:
        database_address("postgresql://u:se@cret@h/d")
    assert "cret" not in str(raised.value)
    for fine in ("postgresql://u:se%40cret@h/d", "postgresql://u@%2Frun%2Fa@b/d", "host=@abstract user=u dbname=d"):
        assert database_address(fine) == fine


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("rediss://h", "rediss://h"),
        ("unix:///run/x.sock", "unix:///run/x.sock"),
        ("valkey://:p@h", "redis://:p@h"),
        ("valkeys://h", "rediss://h"),
        ("redis+cluster://h", "redis+cluster://h"),
        ("valkey+cluster://u:p@h:1,h2/0", "redis+cluster://u:p@h:1,h2/0"),
        ("valkeys+sentinel://h/events", "rediss+sentinel://h/events"),
        (
            "rediss+sentinel://u:p@h:1,[::1]:2/events/3?sentinel_password=x",
            "rediss+sentinel://u:p@h:1,[::1]:2/events/3?sentinel_password=x",
        ),
    ],
)
def test_forms_of_a_redis_address(url: str, address: str) -> None:
    assert redis_address(url) == address


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("redis+cluster://h/2", "a cluster has no databases but 0"),
        ("redis+cluster://h?db=2", "a cluster has no databases but 0"),
        ("redis+cluster://", "is not a Redis address"),
        ("redis+cluster://h,,h2", "is not a Redis address"),
        ("redis+cluster://h:port", "is not a Redis address"),
        ("redis+cluster://u:p@h,u:p@h2:1", "is not a Redis address"),
        ("redis+ring://h", "is not a Redis address"),
        ("redis+sentinel://h", "does not name the service"),
        ("redis+sentinel://h/events/x", "does not name the service"),
        ("redis+sentinel://h/events/1/2", "does not name the service"),
        ("redis://h/0?nonsense=1", "has an option that redis-py does not take"),
        ("redis+cluster://h?nonsense=1", "has an option that redis-py does not take"),
        ("redis+sentinel://h/events?nonsense=1", "has an option that redis-py does not take"),
        ("rediss://h/0?ssl_cert_reqs=maybe", "has an option that redis-py does not take"),
        ("redis://h/0?ssl_ca_certs=x", "has an option that redis-py does not take"),
        ("redis://h/0?protocol=x", "(is|has)"),
    ],
)
def test_a_redis_address_says_what_is_wrong_with_it(url: str, rule: str) -> None:
    with pytest.raises(SettingsError, match=f"REDIS_URL: {rule}"):
        settings(redis_url=url)


def test_the_parts_of_a_redis_address() -> None:
    found = RedisAddress.parse(
        "rediss+sentinel://u:p%40@a,[::1]:2/ev%2Fents/3?sentinel_username=s&socket_timeout=2&ssl_ca_certs=x"
    )
    assert (found.kind, found.hosts, found.service) == ("sentinel", (("a", 26379), ("::1", 2)), "ev/ents")
    tls = {"ssl_ca_certs": "x", "connection_class": SSLConnection}
    assert found.options == {"username": "u", "password": "p@", "db": 3, "socket_timeout": 2.0} | tls
    assert found.sentinel_options == {"username": "s"} | tls, "the servers' password is not theirs"
    found = RedisAddress.parse("redis+cluster://:p@a,b:1")
    assert (found.kind, found.hosts, found.options) == ("cluster", (("a", 6379), ("b", 1)), {"password": "p"})
    found = RedisAddress.parse("unix:///x?db=3")
    assert (found.kind, found.hosts, found.options["path"], found.options["db"]) == ("server", (), "/x", 3)


def test_the_addresses_that_the_page_names() -> None:
    page = (Path(__file__).parents[2] / "docs/operations/cluster.md").read_text()
    named = re.findall(r"^\| `(\w[\w+]*://\S+)` \|", page, re.MULTILINE) + re.findall(
        r"REDIS_URL='(.*)'$", page, re.MULTILINE
    )
    assert len(named) == 7
    assert [RedisAddress.parse(redis_address(url)).kind for url in named[3:5]] == ["cluster", "sentinel"]
    for url in named:
        assert redis_address(url.replace("redis", "valkey", 1)) == redis_address(url)


def test_dead_letters_outlive_their_ledger_rows() -> None:
    addresses: dict[str, Any] = {"database_url": "postgresql://h/d", "redis_url": "redis://h"}
    assert ConsumerSettings(**addresses).dead_letter_retention_days is None, "for ever"
    with pytest.raises(
        SettingsError, match="CONSUMER_DEAD_LETTER_RETENTION_DAYS is 29, CONSUMER_LEDGER_RETENTION_DAYS 30"
    ):
        ConsumerSettings(**addresses, dead_letter_retention_days=29)
    assert ConsumerSettings(**addresses, dead_letter_retention_days=30).dead_letter_retention_days == 30


@pytest.mark.parametrize(
    ("field", "url"),
    [
        ("database_url", f"postgresql://u:{PASSWORD}@h:port/d?nonsense=1"),
        ("database_url", f"mysql://u:{PASSWORD}@h/d"),
        ("database_url", f"password={PASSWORD} nonsense=1"),
        ("database_url", f"host=h password='{PASSWORD}"),
        ("redis_url", f"http://u:{PASSWORD}@h"),
        ("redis_url", f"redis://u:{PASSWORD}@h:port/0"),
        ("redis_url", f"redis://u:{PASSWORD}@h/0?socket_timeout=soon"),
        ("redis_url", f"redis://u:{PASSWORD}@h/0?nonsense=S3cr3t"),
        ("redis_url", f"redis+cluster://u:{PASSWORD}@h/3"),
        ("redis_url", f"redis+cluster://h,u:{PASSWORD}@h:port"),
        ("redis_url", f"redis+sentinel://u:{PASSWORD}@h"),
        ("redis_url", f"redis+sentinel://u:{PASSWORD}@h/x?sentinel_password=S3cr3t&x=1"),
    ],
)
def test_o_95_a_malformed_address_is_not_shown(field: str, url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings(**{field: url})
    seen: BaseException | None = refused.value
    while seen is not None:
        if seen is refused.value or not refused.value.__suppress_context__:
            assert "S3cr3t" not in f"{seen} {seen!r}"
        seen = seen.__cause__
    assert field.upper() in str(refused.value)


def test_o_95_a_password_is_in_no_form_of_the_settings() -> None:
    made = settings(database_url=f"postgresql://u:{PASSWORD}@h/d", redis_url=f"redis://:{PASSWORD}@h/0")
    for shown in (str(made), repr(made), f"{made}", str(made.model_dump()), made.model_dump_json()):
        assert "S3cr3t" not in shown
    assert PASSWORD in made.database_url.get_secret_value()
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301 - ours, for multiprocessing


@pytest.mark.parametrize(
    "name", ["public", "tenant_a", "TenantA", "tenant-a", "select", "té", "a b", "a.b", "1a", "ü" * 31]
)
def test_o_89_schema_names_that_work(name: str) -> None:
    assert check_schema(name) == name


@pytest.mark.parametrize(
    "name",
    [
        'x"; DROP TABLE accounts; -- ', "x'); SELECT pg_sleep(5)--", "", " a", "a\n", "a;b", "a'b", 'a"b', "a%b", "a:b",
        "a{s}b", "a\x00", "pg_catalog", "PG_x", "n" * 64, "ü" * 32, None, 7,
    ],
)  # fmt: skip
def test_o_94_schema_names_that_are_refused(name: Any) -> None:
    with pytest.raises(SettingsError, match="schema: "):
        check_schema(name)


@pytest.mark.parametrize("prefix", ["t{x}:", "{}", "a b", "a\n", "x" * 101, None])
def test_a_prefix_that_no_setting_may_have_is_refused_for_jobs_too(prefix: Any) -> None:
    with pytest.raises(SettingsError, match="prefix: must match"):
        jobs.enqueue("redis://127.0.0.1:1", prefix=prefix)
    with pytest.raises(SettingsError, match="prefix: must match"):
        jobs.state("redis://127.0.0.1:1", "mail", uuid.uuid4(), prefix=prefix)
