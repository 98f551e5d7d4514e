"""Settings of the consumer's side; environment prefix ``CONSUMER_``. The rules are those of `outbox.settings`."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from outbox.errors import SettingsError
from outbox.settings import SchemaName, Settings


class ConsumerSettings(Settings):
    """Settings of `consumer run`."""

    model_config = SettingsConfigDict(env_prefix="CONSUMER_")
    prefix: ClassVar[str] = "CONSUMER_"

    #: Schema of the ledger and its companions. Default ``public``.
    schema_name: SchemaName = Field(default="public", validation_alias="CONSUMER_SCHEMA")
    #: This process's name in the group; must be unique among running ones. Default: host, process id and a random part.
    process_name: str | None = Field(default=None, min_length=1, max_length=200)
    #: Most deliveries in one transaction, and in one read of each stream (fewer where those before were large: 16 MiB in all
    #: are wanted at once); what was read beyond one transaction waits for the next. Default 500.
    batch_size: int = Field(default=500, ge=1, le=10_000)
    #: Longest wait for new entries in one read, in seconds; also how soon SIGTERM is noticed when idle. Default 1.
    block_seconds: float = Field(default=1.0, gt=0, le=30)
    #: How long a delivery may stay with one process before others take it over, in seconds; also the pause before a
    #: failed one is tried again. Longer than a batch takes. Default 60.
    claim_seconds: float = Field(default=60.0, ge=0.05, le=86_400)
    #: How often to look for deliveries to take over, in seconds. Default 1. Looks that take long, since pending lists are,
    #: are made less often: a fiftieth of the time, but four times in ``claim_seconds`` at least.
    check_seconds: float = Field(default=1.0, gt=0, le=60)
    #: Longest pause between tries while Redis or PostgreSQL fails, in seconds; pauses grow from 0.05 with jitter. Default 1.
    backoff_max_seconds: float = Field(default=1.0, gt=0, le=60)
    #: After how many times a connection keeps a statement prepared: 5 makes handlers about a fifth faster. Through PgBouncer
    #: only from 1.22 on, with ``max_prepared_statements``; else it is refused at the start. Default: never.
    prepare_threshold: int | None = Field(default=None, ge=0, le=1000)
    #: Days for which the ledger remembers what was processed, and versions of keys that do not change. Longer than the
    #: outbox keeps events (``OUTBOX_RETENTION_SECONDS``) by a day at least, and by an hour more than they stay in the stream
    #: then (``OUTBOX_STREAM_KEEP_SECONDS``), or an event that comes again could be applied again; that is seen to at the
    #: start. It remembers longer where the outbox still has older events (a group lags), or
    #: another consumer of the schema is set to more. Default 30.
    ledger_retention_days: int = Field(default=30, ge=1, le=3650)
    #: Days for which dead letters are kept: at least as long as the ledger remembers, so that what is put aside is never
    #: known as done without being there. What is deleted was not applied, and cannot be any more. Default: for ever.
    dead_letter_retention_days: int | None = Field(default=None, ge=1, le=36_500)
    #: Days that one partition of the ledger holds, and partitions kept ahead of the clock. Defaults 7 and 4.
    ledger_partition_days: int = Field(default=7, ge=1, le=365)
    ledger_partitions_ahead: int = Field(default=4, ge=1, le=100)

    def model_post_init(self, _context: Any) -> None:
        if self.check_seconds > self.claim_seconds and "check_seconds" in self.model_fields_set:
            raise SettingsError("CONSUMER_CHECK_SECONDS must not be longer than CONSUMER_CLAIM_SECONDS")
        letters = self.dead_letter_retention_days
        if letters is not None and letters < self.ledger_retention_days:
            raise SettingsError(
                f"CONSUMER_DEAD_LETTER_RETENTION_DAYS is {letters}, CONSUMER_LEDGER_RETENTION_DAYS "
                f"{self.ledger_retention_days}: dead letters must be kept for at least as long as the ledger remembers that "
                "they were put aside"
            )
