"""Conditions of statements about waits for signals, those of sensors and of rules."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from sqlalchemy import ColumnElement, and_, exists, or_, text

from headgate.store.access.tables import ONE
from headgate.store.tables import OPEN_TRIGGER, dag_run, signal, signal_key, signal_start, signal_wait, trigger

# As text, as the partial index says it: false for the row of a rule whose run has ended.
IS_OPEN: Final = text("(NOT signal_wait.is_held OR signal_wait.met_version IS NOT NULL)")


def is_waiting() -> ColumnElement[bool]:
    """Return the condition that a row of ``signal_wait`` is that of a wait which has not ended.

    That of a sensor ends with its trigger, and that of a rule with the run; that of a DAG when the DAG has it no more.
    """
    of_sensor = exists(ONE).where(trigger.c.id == signal_wait.c.trigger_id, OPEN_TRIGGER)
    of_run = exists(ONE).where(dag_run.c.id == signal_wait.c.dag_run_id, dag_run.c.ended_at.is_(None))
    of_dag = signal_wait.c.dag_id.is_not(None)
    of_sensor, of_run = of_sensor.correlate(signal_wait), of_run.correlate(signal_wait)
    return and_(IS_OPEN, or_(of_sensor, and_(signal_wait.c.rule.is_not(None), of_run), of_dag))


def is_waited_for() -> ColumnElement[bool]:
    """Return the condition that a version was not yet held against a wait for it."""
    return exists(ONE).where(
        signal_key.c.id == signal.c.key_id, *_OF_KEY, signal_wait.c.seen_version < signal.c.version, is_waiting()
    )


def may_be_waited_for() -> ColumnElement[bool]:
    """Return the condition that a version was sent since an open run was created, of which a sensor may wait for it.

    A sensor has no wait until it begins. A rule has one from the first evaluation of its run on, and then that counts.
    """
    of_run = and_(signal_wait.c.dag_run_id == signal_start.c.dag_run_id, signal_wait.c.rule.is_not(None))
    has_rule = exists(ONE).where(of_run, *_OF_KEY).correlate(signal_key, signal_start)
    return exists(ONE).where(
        signal_key.c.id == signal.c.key_id,
        signal_start.c.namespace == signal_key.c.namespace,
        signal_start.c.key == signal_key.c.key,
        signal_start.c.version < signal.c.version,
        dag_run.c.id == signal_start.c.dag_run_id,
        dag_run.c.ended_at.is_(None),
        ~has_rule,
    )


_OF_KEY = (signal_wait.c.namespace == signal_key.c.namespace, signal_wait.c.key == signal_key.c.key)


def is_old(before: datetime) -> ColumnElement[bool]:
    """Return the condition that a version may be cleaned away: it is older, not the newest of its key, nor needed."""
    has_newer = exists(ONE).where(signal_key.c.id == signal.c.key_id, signal_key.c.last_version > signal.c.version)
    # Each by itself: of two conditions that are joined by OR, PostgreSQL asks again for each version.
    return and_(signal.c.sent_at < before, has_newer, ~is_waited_for(), ~may_be_waited_for())


def has_listener(namespace: str, key: str) -> ColumnElement[bool]:
    """Return the condition that a task waits for a key, or that one of a run that has not ended may come to do so."""
    of_key = (signal_wait.c.namespace == namespace, signal_wait.c.key == key, signal_wait.c.dag_id.is_(None))
    waits = exists(ONE).where(*of_key, is_waiting())
    of_run = and_(signal_start.c.dag_run_id == dag_run.c.id, dag_run.c.ended_at.is_(None))
    return or_(waits, exists(ONE).where(signal_start.c.namespace == namespace, signal_start.c.key == key, of_run))
