"""A receipt by mail: ``consumer run examples.effects.mail:shop`` and ``CONSUMER_BATCH_SIZE=1 consumer run examples.effects.mail:mailer``.

The order and the job of sending a receipt are one transaction. The mail follows: at least once, and each time with the
same Message-ID, by which many mailboxes show it once. That is the best that SMTP allows: it has no way to ask whether a
mail was taken.
"""

from __future__ import annotations

import os
import smtplib
from email.message import EmailMessage

from sqlalchemy.orm import Session

from consumer import Consumer, Envelope, Reject, Retry
from examples.effects.models import Order
from outbox import Job, record

shop = Consumer("shop", topics=["orders"])
away = Retry(
    retry_on=(ConnectionError, smtplib.SMTPServerDisconnected)
)  # says nothing about a mail, so it counts for nothing
mailer = Consumer("mailer", queues=["mail"], retry=away)


@shop.on("order.paid")
def keep(event: Envelope, session: Session) -> None:
    """Keep the order, and have a receipt sent."""
    session.add(Order(id=event.key, amount_halala=event.payload["amount_halala"]))
    receipt = Job(
        queue="mail",
        type="send_receipt",
        key=event.key,
        id=event.derived_id("receipt"),
        payload={"to": event.payload["mail"], "amount_halala": event.payload["amount_halala"]},
    )
    record(session, receipt)


@mailer.job("send_receipt")
def send(job: Envelope, session: Session) -> dict[str, str]:
    """Send it; nothing here is written to the database but the ledger row."""
    message = EmailMessage()
    message["Message-ID"] = f"<{job.id}@shop.example>"
    message["Date"] = job.time
    message["From"], message["To"] = "shop@shop.example", job.payload["to"]
    message["Subject"] = f"Receipt for order {job.key}"
    message.set_content(f"We have received {job.payload['amount_halala'] / 100:.2f} SAR. Thank you.\n")
    with smtplib.SMTP(os.environ["SMTP_HOST"], int(os.environ["SMTP_PORT"]), timeout=10) as server:
        try:
            server.send_message(message)
        except smtplib.SMTPRecipientsRefused as error:
            if all(code >= 500 for code, _ in error.recipients.values()):  # 4xx: later, perhaps
                raise Reject("no such mailbox") from error
            raise
    return {"message_id": message["Message-ID"]}  # the job's result: for people
