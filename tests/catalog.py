"""What PostgreSQL's catalog says, for tests."""

from __future__ import annotations

from typing import Any

import psycopg


def existing_partitions(connection: psycopg.Connection[Any], schema: str, table: str) -> list[str]:
    """Names of the partitions of a table, the default one included."""
    rows = connection.execute(
        """
        SELECT child.relname FROM pg_catalog.pg_inherits
        JOIN pg_catalog.pg_class parent ON parent.oid = inhparent
        JOIN pg_catalog.pg_namespace n ON n.oid = parent.relnamespace
        JOIN pg_catalog.pg_class child ON child.oid = inhrelid
        WHERE n.nspname = %s AND parent.relname = %s ORDER BY child.relname
        """,
        (schema, table),
    )
    return [name for (name,) in rows]
