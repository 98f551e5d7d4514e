"""Alembic's entry: one script directory, two branches (`outbox`, `consumer`), each with its own version table.

Run through `outbox migrate` and `consumer migrate` (see `outbox.schema`), which pass the branch, the schema and the
connection as attributes. Everything happens in one transaction under an advisory lock, so that any number of processes
may start at once: they queue, and all but the first find nothing to do.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, text

attributes = context.config.attributes
schema: str = attributes["schema"]
branch: str = attributes["branch"]
connection: Connection | None = attributes.get("connection")

options = {
    "version_table": f"{branch}_schema_version",
    "version_table_schema": schema,
    "transactional_ddl": True,
    "transaction_per_migration": False,
}
quoted = '"' + schema.replace('"', '""') + '"'

if connection is None:
    context.configure(dialect_name="postgresql", literal_binds=True, as_sql=True, **options)
    with context.begin_transaction():
        context.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted}")
        context.run_migrations(schema=quoted)
else:
    # IF NOT EXISTS is not safe against another session that creates the same name; the lock is.
    lock = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")
    connection.execute(lock, {"name": f"outbox-consumer migrate {branch} {schema}"})
    exists = text("SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = :schema")
    if connection.execute(exists, {"schema": schema}).first() is None:
        connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {quoted}")
    # Producers queue behind a migration that waits for one of them: it waits for a moment, and `outbox.schema` tries again.
    connection.exec_driver_sql("SET LOCAL lock_timeout = '300ms'")
    context.configure(connection=connection, **options)
    context.run_migrations(schema=quoted)
