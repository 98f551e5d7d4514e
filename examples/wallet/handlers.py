"""The consumer: ``consumer run examples.wallet.handlers:wallet``.

A handler's changes and the note that its event is done (the ledger row) are one transaction. So a handler needs no
thought about repeats: an event that comes again is recognised before the handler is called.
"""

from __future__ import annotations

from sqlalchemy import Connection, Engine
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from consumer import Consumer, Envelope, Order
from examples.wallet.models import Address, Wallet, create_tables

__all__ = ["create_tables", "wallet"]

wallet = Consumer("wallet", topics=["payments", "customers"])


@wallet.on("payment.received", order=Order.ANY)  # a delta: every event once, in any order
def credit(event: Envelope, session: Session) -> None:
    """Add the amount to the wallet, which is opened by its first payment."""
    make_tables_once(session)
    amount = event.payload["amount_halala"]
    opened = insert(Wallet).values(id=event.key, balance_halala=amount)
    session.execute(
        opened.on_conflict_do_update(
            index_elements=[Wallet.id], set_={"balance_halala": Wallet.balance_halala + amount}
        )
    )


@wallet.on("customer.moved", order=Order.LATEST)  # a state: skipped when not newer than what was applied
def move(event: Envelope, session: Session) -> None:
    """Keep the newest city."""
    make_tables_once(session)
    city = event.payload["city"]
    known = insert(Address).values(customer_id=event.key, city=city)
    session.execute(known.on_conflict_do_update(index_elements=[Address.customer_id], set_={"city": city}))


_prepared: set[Engine] = set()


def make_tables_once(session: Session) -> None:
    """Make the demo's tables before the first event, so that it runs on an empty database. Yours come by migrations."""
    bind = session.get_bind()
    engine = bind.engine if isinstance(bind, Connection) else bind
    if engine not in _prepared:
        create_tables(engine)  # on a connection of its own: it stays, whatever becomes of the event
        _prepared.add(engine)
