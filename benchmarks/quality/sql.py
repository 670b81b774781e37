"""Execution accuracy of SQL on SQLite databases that are opened read-only.

A query that a model has written only reads its database: the authorizer denies whatever writes, attaches or sets, and
extensions are not loaded. It ends within ``SECONDS``, or soon after: the clock is read between steps of SQLite's
virtual machine, and what one step can do is limited by the length of a value. SQLite's memory, temporary tables
included, and that of the result are limited.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from collections import Counter
from pathlib import Path

from draftree.errors import RunError

SECONDS = 5.0
MEMORY = 256 << 20
"""Bytes that SQLite may use, in the whole process and from then on."""
RESULT = 64 << 20
"""Bytes of a query's rows."""
_STEPS = 100
"""Virtual machine steps between looks at the clock."""
_LENGTHS = {sqlite3.SQLITE_LIMIT_LENGTH: 50_000, sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000}
"""Bytes of a row or value, and of a pattern: a search takes the product of two lengths, and no clock is read in it."""
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


def same_rows(database: Path, query: str, gold: str) -> bool:
    """Does a query give the rows of the gold query? Their order counts where the gold query has an ORDER BY.

    Raises:
        RunError: the database or the gold query cannot be read.
    """
    try:
        expected = read_rows(database, gold)
    except (sqlite3.Error, MemoryError) as error:
        raise RunError(f"the gold query fails on {database} ({error}): get the database again") from None
    try:
        found = read_rows(database, query)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError):
        return False
    if "order by" in " ".join(gold.lower().split()):
        return found == expected
    return Counter(found) == Counter(expected)


def read_rows(database: Path, query: str) -> list[tuple[object, ...]]:
    """What one statement reads.

    Raises:
        sqlite3.Error: it fails, writes, takes too long, or reads too much.
        MemoryError: it takes too much memory.
    """
    until = time.monotonic() + SECONDS
    connection = sqlite3.connect(f"file:{database.resolve()}?mode=ro&immutable=1", uri=True)
    try:
        connection.text_factory = lambda data: data.decode(errors="replace")
        connection.execute(f"PRAGMA hard_heap_limit = {MEMORY}")
        connection.execute("PRAGMA temp_store = MEMORY")  # where that limit holds
        for what, most in _LENGTHS.items():
            connection.setlimit(what, most)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        connection.set_progress_handler(lambda: int(time.monotonic() > until), _STEPS)
        cursor = connection.execute(query)
        if cursor.description is None:
            raise sqlite3.OperationalError("it reads nothing")
        rows, size = list[tuple[object, ...]](), 0
        for row in cursor:
            size += sys.getsizeof(row) + sum(map(sys.getsizeof, row))
            if size > RESULT:
                raise sqlite3.OperationalError(f"rows of more than {RESULT} bytes")
            rows.append(row)
        return rows
    finally:
        connection.close()
