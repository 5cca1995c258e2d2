"""What signals do to tasks whose operators decide it themselves: workers are asked, and their answers are stored.

It is one of the duties of the part for tasks. Which questions there are is in the database
(`headgate.store.scheduling.deciding`); here are only those that a worker has, and the answers that are not stored yet.
"""

from __future__ import annotations

import uuid
from collections import deque

from headgate.protocol import marks
from headgate.protocol.messages.queries import StartSignal
from headgate.protocol.messages.worker import DecideSignals
from headgate.store.ids import Epoch
from headgate.store.scheduling.deciding import TRIES_MAX, Question
from headgate.store.scheduling_verbs import SchedulingVerbs
from headgate.supervisor.executors.deciders import Answer, Deciders
from headgate.supervisor.logs.task_logs import TaskLogs


class Decisions:
    """Asks `Deciders` what the store wants to know, and stores their answers."""

    def __init__(self, store: SchedulingVerbs, deciders: Deciders, logs: TaskLogs) -> None:
        self._store = store
        self._deciders = deciders
        self._logs = logs
        self._open: dict[str, Question] = {}  # that a worker has, by token
        self._answers: deque[Answer] = deque()  # to be stored
        self._is_asked = False  # there may be questions

    def notify(self) -> None:
        """Look for questions soon."""
        self._is_asked = True

    def step(self, epoch: Epoch, now: float) -> bool:
        """Store an answer, if there is one, else ask; return whether something was decided.

        Errors of the store are raised; then the next step tries again.
        """
        self._answers.extend(self._deciders.events(now))
        if self._answers:
            self._settle(epoch, self._answers[0])
            self._answers.popleft()
            self._is_asked = True  # about the same task
            return True
        room = self._deciders.room(now) if self._is_asked else 0
        if room:
            busy = {question.instance for question in self._open.values()}
            questions = self._store.ask(epoch, limit=room, busy=busy)
            self._is_asked = len(questions) == room
            for question in questions:
                self._ask(question)
        return False

    def wake_at(self) -> float:
        """Return the time at which the next step is due."""
        return 0.0 if self._answers else self._deciders.wake_at(is_asked=self._is_asked)

    def close(self) -> None:
        """End the workers. What they were asked is asked again, by whoever looks next."""
        self._open.clear()
        self._answers.clear()
        self._deciders.close()

    def _ask(self, question: Question) -> None:
        name = question.name
        token = uuid.uuid4().hex
        self._open[token] = question
        self._deciders.decide(
            DecideSignals(
                token,
                question.instance,
                question.file,
                name.dag_id,
                name.run_id,
                name.task_id,
                name.try_number,
                tuple(StartSignal(one.key, one.namespace, one.version, one.value) for one in question.signals),
            )
        )
        marks.reach("signals.decision_given")

    def _settle(self, epoch: Epoch, answer: Answer) -> None:
        question = self._open[answer.asked.token]
        settled = self._store.settle_decisions(
            epoch, question, answer.actions, answer.error, is_unloaded=answer.is_unloaded
        )
        marks.reach("signals.decided_stored")
        del self._open[answer.asked.token]
        if settled is None:
            self._logs.say(question.name, "info", "what on_signal has decided does not count any more")
            return
        for signal, action in zip(question.signals, answer.actions, strict=False):
            self._logs.say(
                question.name,
                "info",
                "on_signal has decided",
                **{"key": signal.key, "version": signal.version, "action": action},
            )
        if answer.error:
            failed = question.signals[len(answer.actions)]
            event = f"on_signal has failed, try {settled.tries} of {TRIES_MAX}"
            if settled.has_given_up:
                event += ": the signal does nothing"
            self._logs.say(
                question.name,
                "error",
                "on_signal cannot be asked" if answer.is_unloaded else event,
                key=failed.key,
                version=failed.version,
                error=answer.error,
                traceback=answer.traceback,
            )
