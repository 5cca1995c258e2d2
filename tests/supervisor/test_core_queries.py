"""Queries of triggers, answered by the core."""

from __future__ import annotations

import msgspec
import pytest
from tests.supervisor.core_harness import SETTINGS, Supervised, World, add_watchers, fired

from headgate.protocol.messages.queries import (
    GetConnection,
    GetVariable,
    LastEvent,
    ListSignals,
    Request,
    Response,
    SecretText,
    StoredEvent,
)
from headgate.protocol.messages.runner import (
    RunnerSettings,
)
from headgate.store.errors import DatabaseAway, RowsRefused
from headgate.supervisor.core import SupervisorCore
from headgate.supervisor.triggers.leases import Identity

SMALL_FRAMES = msgspec.structs.replace(SETTINGS, runner=RunnerSettings(frame_bytes_max=1000))


def test_an_answer_that_fits_no_frame_is_an_error_for_who_asked(world: World) -> None:
    world.store.tasks.variables.put("LONG", b"x" * 2000)
    supervisor = world.supervisor(SMALL_FRAMES)
    supervisor.start_runner()
    supervisor.say(Request(1, GetVariable("LONG")))
    (response,) = supervisor.sent(Response)
    assert "the limit is 1,000 (frame_bytes_max)" in response.error


def test_a_query_that_is_refused_is_an_error_for_who_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RowsRefused("a number that no column holds")

    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.say(Request(1, ListSignals("a", after=2**63)))
    monkeypatch.setattr(world.store.tasks.variables, "get", refuse)
    supervisor.say(Request(2, GetVariable("a")))
    by_verb, by_database = supervisor.sent(Response)
    assert "after must be a version" in by_verb.error
    assert by_database.error == "the database refuses the values: a number that no column holds"


def test_requests_are_answered_while_a_round_waits_for_the_database(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    (spec,) = supervisor.created()
    supervisor.round(fired(spec, 0, key="k"))

    def away(*_: object, **__: object) -> None:
        raise DatabaseAway("db", "no answer")

    monkeypatch.setattr(world.store, "store_slice", away)
    supervisor.round(fired(spec, 1))
    supervisor.say(Request(1, LastEvent(trigger_id)))
    (response,) = supervisor.sent(Response)
    assert isinstance(response.result, StoredEvent)
    assert (response.result.sequence_index, response.result.key) == (0, "k")
    monkeypatch.setattr(world.store, "last_event", away)
    supervisor.say(Request(2, LastEvent(trigger_id)))
    (response,) = supervisor.sent(Response)
    assert response.result is None
    assert "no answer" in response.error


def test_a_database_that_does_not_answer_is_not_asked_again_for_every_query(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    asked = []

    def away(*_: object) -> None:
        asked.append(world.now)
        raise DatabaseAway("db", "no answer within 5 s")

    monkeypatch.setattr(world.store, "last_event", away)
    for number in range(100):
        supervisor.say(Request(number + 1, LastEvent(trigger_id)))
    responses = supervisor.sent(Response)
    assert len(responses) == 100
    assert all(response.error for response in responses)
    assert len(asked) == 1


def test_a_trigger_is_told_variables_and_connections(world: World) -> None:
    world.store.tasks.connections.put("db", b"pg://me:hunter22@h")
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.say(Request(1, GetVariable("region")))
    supervisor.say(Request(2, GetConnection("db")))
    supervisor.say(Request(3, GetVariable("nothing")))
    assert [(response.id, response.result) for response in supervisor.sent(Response)] == [
        (1, SecretText("north")),
        (2, SecretText("pg://me:hunter22@h")),
        (3, SecretText(None)),
    ]


def test_a_query_that_is_refused_is_answered_with_the_reason_and_holds_up_no_other(world: World) -> None:
    (trigger_id,) = add_watchers(world, 1)
    supervisor = world.supervisor()
    supervisor.start_runner()
    supervisor.say(Request(1, GetVariable("")))
    supervisor.say(Request(2, LastEvent(trigger_id)))
    refused, answered = supervisor.sent(Response)
    assert (refused.id, "must not be empty" in refused.error) == (1, True)
    assert (answered.id, answered.error) == (2, "")


def test_a_supervisor_without_answers_says_so(world: World) -> None:
    core = SupervisorCore(world.store, Identity("host", 1, "machine", 0.0), SETTINGS, is_gone=lambda row: False)
    supervisor = Supervised(world, core)
    supervisor.start_runner()
    supervisor.say(Request(1, GetVariable("region")))
    (response,) = supervisor.sent(Response)
    assert response.error == "this supervisor answers no such queries"


def test_a_database_that_does_not_answer_is_not_asked_again_for_any_query(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = world.supervisor()
    supervisor.start_runner()
    asked = []

    def away(*_: object) -> None:
        asked.append(world.now)
        raise DatabaseAway("db", "no answer within 5 s")

    monkeypatch.setattr(world.store.tasks.variables, "get", away)
    for number in range(10):
        supervisor.say(Request(number + 1, GetVariable("v")))
    assert [bool(response.error) for response in supervisor.sent(Response)] == [True] * 10
    assert len(asked) == 1
    monkeypatch.undo()
    supervisor.pass_time(10.0)
    supervisor.say(Request(11, GetVariable("v")))
    assert [reply.id for reply in supervisor.sent(Response)] == [11]
