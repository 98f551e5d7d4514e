"""What the commands that run for long do first: look with the doctor's eyes, and speak of it before it hurts.

Without ``strict`` nothing waits for the look: it is taken beside the work by a thread of its own, as soon as the servers
answer, and what is dangerous is one line of the log. With it nothing is started before the look was taken, or at all.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from outbox.doctor import Finding, away, dangerous
from outbox.errors import NotStarted
from outbox.retry import Stop

_log = logging.getLogger(__name__)

#: Pause before the next look while a server does not answer: the first, and the longest beside the work and before it.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _WAITING_PAUSE_SECONDS = 0.5, 30.0, 2.0
#: How long the end of the command waits for a look under way.
_LAST_WORDS_SECONDS = 0.2


@contextlib.contextmanager
def examined(look: Callable[[], list[Finding]], *, strict: bool, stopping: Stop) -> Iterator[None]:
    """Take the look once: before the block where it is strict, else beside it.

    Args:
        look: makes the findings, those about servers that do not answer among them.
        strict: what is dangerous keeps the block from being entered; a server that does not answer is waited for.
        stopping: set when the command is to end.

    Raises:
        NotStarted: strict, and something is dangerous.
    """
    if strict:
        examine(look, strict=True, stopping=stopping)
        yield
        return
    looking = threading.Thread(
        target=examine, args=(look,), kwargs={"strict": False, "stopping": stopping}, name="start-check", daemon=True
    )
    looking.start()
    try:
        yield
    finally:
        stopping.set()
        looking.join(_LAST_WORDS_SECONDS)


def examine(look: Callable[[], list[Finding]], *, strict: bool, stopping: Stop) -> None:
    """The look of `examined` alone; not strict, it says what it finds and has no errors.

    Raises:
        NotStarted: strict, and something is dangerous.
    """
    if strict:
        if dangers := _look(look, stopping, strict=True):
            found = "; ".join(f"{finding.code}: {finding.what} -> {finding.do}" for finding in dangers)
            raise NotStarted(f"not started, since it is to be strict (--strict) and there is danger: {found}")
        return
    try:
        _look(look, stopping, strict=False)
    except Exception:  # a doctor who stumbles must not end the work
        _log.exception("the check at the start failed", extra={"action": "start_check_failed"})


def _look(look: Callable[[], list[Finding]], stopping: Stop, *, strict: bool) -> list[Finding]:
    """Look until every server has answered, and say each danger once; strict: until the first ones are seen."""
    told: dict[str, Finding] = {}
    waiting: set[str] = set()
    pause = _PAUSE_SECONDS
    while not stopping.is_set():
        findings = look()
        for finding in findings:
            if dangerous(finding) and finding.code not in told:
                told[finding.code] = finding
                if not strict:
                    _log.warning(
                        "start check: %s: %s -> %s", finding.code, finding.what, finding.do,
                        extra={"action": "start_danger", "code": finding.code},
                    )  # fmt: skip
        missing = [finding for finding in findings if away(finding)]
        if not missing or (strict and told):
            if not told:
                _log.info("start check: no danger found", extra={"action": "start_checked"})
            break
        for finding in missing:
            if strict and finding.code not in waiting:
                waiting.add(finding.code)
                _log.warning(
                    "start check waits, nothing is started before: %s", finding.what, extra={"action": "start_waits"}
                )
        stopping.wait(pause)
        pause = min(2 * pause, _WAITING_PAUSE_SECONDS if strict else _LONGEST_PAUSE_SECONDS)
    return list(told.values())
