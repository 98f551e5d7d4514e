"""Settings of the consumer's side; environment prefix ``CONSUMER_``. The rules are those of `outbox.settings`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

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
    #: Processes that `consumer run` forks, which a parent watches over: one that ends is replaced, and what it died of is known
    #: and counted. 1: it works itself, and nobody watches. Default 1.
    processes: int = Field(default=1, ge=1, le=256)
    #: Threads of each, with connections of their own: for handlers that wait for others. Default 1.
    threads: int = Field(default=1, ge=1, le=256)
    #: Most deliveries in one transaction, and in one read of each stream (fewer where those before were large: 16 MiB in all
    #: are wanted at once); what was read beyond one transaction waits for the next. Default 500.
    batch_size: int = Field(default=500, ge=1, le=10_000)
    #: Longest wait for new entries in one read, in seconds; also how soon SIGTERM is noticed when idle, so that more than a
    #: second counts as one. Default 1.
    block_seconds: float = Field(default=1.0, gt=0, le=30)
    #: How long a process may not be heard of before others take over its deliveries, in seconds. A batch may take longer: what
    #: a process is at, it renews three times as often. Default 60.
    claim_seconds: float = Field(default=60.0, ge=0.05, le=86_400)
    #: How long what runs at SIGTERM may go on, in seconds; then the process ends by itself with exit code 75, and what it had
    #: goes back as if it had not been delivered. At least five less than whoever stops it waits until SIGKILL. Default 20.
    drain_seconds: float = Field(default=20.0, ge=0, le=86_400)
    #: How often to look for deliveries to take over, in seconds. Default 1. Looks that take long, since pending lists are,
    #: are made less often: a fiftieth of the time, but four times in ``claim_seconds`` at least.
    check_seconds: float = Field(default=1.0, gt=0, le=60)
    #: How often an event may be delivered whose process ended each time (killed, out of memory, crashed), or that lost
    #: its connection to PostgreSQL each time, before it is put aside as a dead letter. From the third time on it runs
    #: alone. Default 5.
    max_deliveries: int = Field(default=5, ge=1, le=1000)
    #: Seconds that an event waits for a handler of its type (of a version that is being deployed, say) before it is put aside.
    #: At most what the ledger remembers. Default 3600.
    no_handler_seconds: float = Field(default=3600.0, ge=0)
    #: Seconds that an event of a handler with ``Order.NEXT`` waits for the versions before it, before it is put aside. At most
    #: what the ledger remembers. Default 3600.
    gap_seconds: float = Field(default=3600.0, ge=0)
    #: With so many dead letters in the last ``dead_letter_window_seconds`` nothing more is tried: a flood means that it is not the
    #: events. The consumer goes on when they are older, requeued or discarded. Defaults 1000 and 600; 0: however many.
    dead_letter_limit: int = Field(default=1000, ge=0, le=1_000_000)
    dead_letter_window_seconds: float = Field(default=600.0, gt=0, le=86_400)
    #: While so many events wait for another try, nothing new is read: it would fail, too. Default 10000.
    max_waiting: int = Field(default=10_000, ge=1, le=10_000_000)
    #: Longest pause between tries while Redis or PostgreSQL fails, in seconds; pauses grow from 0.05 with jitter. Default 1.
    backoff_max_seconds: float = Field(default=1.0, gt=0, le=60)
    #: After how many times a connection keeps a statement prepared, which makes handlers about a fifth faster; or ``never``.
    #: A number holds through PgBouncer, too: only from 1.22 on, with ``max_prepared_statements``; else it is refused at the
    #: start. Default: 5 on direct connections, never through a pooler.
    prepare_threshold: Annotated[int, Field(ge=0, le=1000)] | Literal["never"] | None = None
    #: Days for which the ledger remembers what was processed, and versions of keys that do not change (those of ``Order.NEXT``
    #: for ever, and those of keys with dead letters for as long as there are such). Longer than the
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
        for name in ("no_handler_seconds", "gap_seconds"):
            if getattr(self, name) > self.ledger_retention_days * 86_400:
                raise SettingsError(
                    f"CONSUMER_{name.upper()} is {getattr(self, name):g}, longer than CONSUMER_LEDGER_RETENTION_DAYS "
                    f"({self.ledger_retention_days}): the ledger would forget an event that still waits"
                )
        letters = self.dead_letter_retention_days
        if letters is not None and letters < self.ledger_retention_days:
            raise SettingsError(
                f"CONSUMER_DEAD_LETTER_RETENTION_DAYS is {letters}, CONSUMER_LEDGER_RETENTION_DAYS "
                f"{self.ledger_retention_days}: dead letters must be kept for at least as long as the ledger remembers that "
                "they were put aside"
            )
