"""Read what comes next while the last is put in its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Value = TypeVar("Value")


def read_ahead(read: Callable[[Item], Value], items: Iterable[Item], *, threads: int) -> Iterator[Value]:
    """What `read` gives for each item, in their order; no more are under way or waiting than there are threads.

    With 0 threads each is read when it is asked for. Raises what `read` raises, at the item's turn.
    """
    if not threads:
        yield from map(read, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="reading") as pool:
        waiting: deque = deque()
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) == threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
