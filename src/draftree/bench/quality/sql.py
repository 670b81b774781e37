"""Execution accuracy of SQL on SQLite databases that are opened read-only."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from pathlib import Path

from ...errors import RunError

SECONDS = 5.0
ROWS = 100_000
_STEPS = 10_000
"""Virtual machine steps between looks at the clock."""
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


def same_rows(database: Path, query: str, gold: str) -> bool:
    """Does a query give the rows of the gold query? Their order counts where the gold query has an ORDER BY.

    Raises:
        RunError: the database or the gold query cannot be read.
    """
    try:
        expected = _rows(database, gold)
    except sqlite3.Error as error:
        raise RunError(f"the gold query fails on {database} ({error}): get the database again") from None
    try:
        found = _rows(database, query)
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return False
    if "order by" in " ".join(gold.lower().split()):
        return found == expected
    return Counter(found) == Counter(expected)


def _rows(database: Path, query: str) -> list[tuple[object, ...]]:
    """What one statement reads.

    Raises:
        sqlite3.Error: it fails, writes, or takes too long.
    """
    until = time.monotonic() + SECONDS
    connection = sqlite3.connect(f"file:{database.resolve()}?mode=ro&immutable=1", uri=True)
    try:
        connection.text_factory = lambda data: data.decode(errors="replace")
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        connection.set_progress_handler(lambda: int(time.monotonic() > until), _STEPS)
        cursor = connection.execute(query)
        if cursor.description is None:
            raise sqlite3.OperationalError("it reads nothing")
        rows = cursor.fetchmany(ROWS + 1)
        if len(rows) > ROWS:
            raise sqlite3.OperationalError(f"more than {ROWS} rows")
        return [tuple(row) for row in rows]
    finally:
        connection.close()
