"""The facts about the rules of a task, which `headgate.scheduling.why` explains with those of the task itself."""

from __future__ import annotations

import msgspec
from sqlalchemy import select

from headgate.protocol.messages.dags import TaskSpec
from headgate.protocol.messages.rules import Rule, SignalRule, rule_name
from headgate.scheduling import signal_rules
from headgate.scheduling.why import RuleFacts
from headgate.scheduling.why_triggers import send_command
from headgate.store.db.transaction import Tx
from headgate.store.ids import TaskInstanceId
from headgate.store.signals import feeds, subscriptions, waits
from headgate.store.tables import signal_key, signal_wait


def rules_of(tx: Tx, instance: TaskInstanceId, spec: TaskSpec | None, *, is_open: bool) -> tuple[RuleFacts, ...]:
    """Return the rules of a task about signals, and what users have asked for that has not acted.

    Signals count as long as the run ``is_open``.
    """
    named = {} if spec is None or spec.signals is None else {rule_name(rule): rule for rule in spec.signals.rules}
    rows = tx.connection.execute(
        select(signal_wait, signal_key.c.last_version)
        .select_from(signal_wait.outerjoin(signal_key, waits.SAME_KEY))
        .where(signal_wait.c.task_instance_id == instance)
        .order_by(signal_wait.c.id)
    ).all()
    found = {row.rule: row for row in rows}
    told = [
        RuleFacts("a user asks for it", subscriptions.BY_HAND[name], met_version=row.met_version)
        for name, row in found.items()
        if name in subscriptions.BY_HAND and row.met_version is not None
    ]
    for name, rule in named.items():
        facts = RuleFacts(
            signal_rules.rule_text(rule),
            rule.action,
            is_necessary=rule.condition == "necessary",
            sent_by=_sent_by(rule),
            replaced=feeds.count_replaced(tx, rule.key, rule.namespace) if isinstance(rule, SignalRule) else 0,
        )
        if (row := found.get(name)) is not None:  # a new run has none yet
            facts = msgspec.structs.replace(
                facts,
                met_version=row.met_version,
                seen_version=row.seen_version,
                last_version=row.last_version or 0 if is_open and isinstance(rule, SignalRule) else None,
                asks="no" if not row.asks else "yes" if row.ask_at is None else "now",
                error=row.decision_error,
                undecided=row.undecided,
                failed_starts=row.failed_starts,
                failed_error=row.failed_error,
                decided=row.decided,
                due_in_s=None if row.due_at is None else (row.due_at - tx.now).total_seconds(),
            )
        told.append(facts)
    return tuple(told)


def _sent_by(rule: Rule) -> str:
    if not isinstance(rule, SignalRule):
        return ""
    return send_command(rule.key, rule.namespace, has_value=rule.predicate is not None)
