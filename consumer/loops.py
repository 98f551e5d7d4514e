"""Handlers that are ``async def``: an event loop for their thread, and an AsyncSession in the consumer's transaction.

The session's statements go through the same connection as everything else in the transaction, and so the loop stands still
while PostgreSQL works. That harms nobody: the loop runs this one handler, and what it awaits elsewhere (HTTP, say) goes on in
the operating system meanwhile.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.errors import HandlerMisuse

Asynchronous = Callable[[Any, Any], Coroutine[Any, Any, object]]
#: How long tasks that a handler has left running may take to end when they are cancelled.
_STUBBORN_SECONDS = 5.0


class AsyncHandlerSession(AsyncSession):
    """The AsyncSession that async handlers get: a handler's Session, awaited. Its transaction is the consumer's to end."""

    def __init__(self, session: Session) -> None:
        super().__init__(sync_session_class=lambda **_: session)  # type: ignore[arg-type]  # it is called, no more

    async def execute(self, *arguments: Any, **options: Any) -> Any:
        """As AsyncSession's, which wants a cursor of its own kind."""
        return await self.run_sync(lambda session: session.execute(*arguments, **options))

    async def connection(self, *_: object, **__: object) -> NoReturn:
        raise HandlerMisuse(
            "an async handler's session has no AsyncConnection: execute with the session itself, or get the Connection "
            "with session.run_sync(lambda session: session.connection())"
        )


class Loop:
    """An event loop of this thread, made when it is first needed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0

    def task(self, function: Asynchronous, argument: object, session: Session) -> asyncio.Task[object]:
        """What calls an async handler, to be given to `run`; its changes are then sent to PostgreSQL."""
        if self._loop is None or self._process != os.getpid():  # a fork's would wait for what its parent waits for
            self._loop, self._process = asyncio.new_event_loop(), os.getpid()
        return self._loop.create_task(_to_the_end(function, argument, session), context=contextvars.copy_context())

    def run(self, task: asyncio.Task[object]) -> object:
        """The task's result, when nothing of it goes on any more."""
        loop = task.get_loop()
        try:
            return loop.run_until_complete(task)
        finally:
            if asyncio.all_tasks(loop):  # they would go on with the next handler, which has the same session
                self.close()

    def close(self) -> None:
        """Close the loop; what still runs on it is never continued."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None


def cancel(task: asyncio.Task[object]) -> None:
    """Cancel a task from another thread."""
    with suppress(RuntimeError):  # its loop is closed
        task.get_loop().call_soon_threadsafe(task.cancel)


async def _to_the_end(function: Asynchronous, argument: object, session: Session) -> object:
    given = AsyncHandlerSession(session)
    left = set[asyncio.Task[Any]]()
    try:
        result = await function(argument, given)
        await given.flush()  # now, so that an error names the right event
    finally:
        for _ in range(2):  # asyncio closes forgotten generators in tasks of its own: one turn to make them, one to run
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_STUBBORN_SECONDS)
        for task in left:
            if task.done() and not task.cancelled():
                task.exception()  # seen, or asyncio would log it
    if left:
        raise HandlerMisuse(
            f"the handler has left {len(left)} of its tasks running, which were cancelled: await them, or use a TaskGroup"
        )
    return result
