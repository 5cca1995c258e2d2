"""The golden frames of the worker link: one of each message, and the bytes that it has on the wire."""

from __future__ import annotations

import msgspec
import pytest
from tests.protocol.golden import check_golden, fields_at_default

from headgate.protocol.link.wire import Role, encode_message
from headgate.protocol.link.worker_dialect import (
    WORKER_WIRE,
)
from headgate.protocol.messages import worker as work
from headgate.protocol.messages.dags import AssetSchedule, CronSchedule, DagSpec, SignalSchedule, StartTrigger, TaskSpec
from headgate.protocol.messages.maps import (
    Batch,
    Concat,
    Elements,
    MapSpec,
    Output,
    OwnValue,
    Product,
    Values,
    Worklist,
    Zip,
)
from headgate.protocol.messages.queries import (
    CreateRun,
    ElementRoom,
    EmitElements,
    EncodedValue,
    GetConnection,
    GetStartSignals,
    GetTaskStates,
    GetVariable,
    GetXCom,
    GetXComs,
    ListenSignals,
    ListSignals,
    Request,
    Response,
    RunCreated,
    SecretText,
    SendSignals,
    SignalPage,
    SignalsHeard,
    SignalsSent,
    StartSignal,
    StartSignals,
    TaskState,
    TaskStates,
    XComPage,
)
from headgate.protocol.messages.rules import ClockRule, CronRule, Rules, SignalRule, TaskRule
from headgate.protocol.messages.signals import Predicate, SentSignal, SignalSend, SignalWait, StoredSignal
from headgate.protocol.messages.start_triggers import Listed, OwnArguments
from headgate.protocol.messages.steps import (
    Appended,
    Emitted,
    StepDeferred,
    StepFailed,
    StepHandled,
    StepNotBegun,
    StepSkipped,
    StepSucceeded,
    XCom,
)
from headgate.protocol.messages.task_streams import Handled, StreamEvent, StreamOptions, StreamPart
from headgate.protocol.messages.worker import (
    AssetEvent,
    DecideSignals,
    FileParsed,
    ParseFile,
    RecallSteps,
    RunStep,
    SignalsDecided,
    Step,
    StepEnded,
    StepLoaded,
    StepsReturned,
    WorkerHello,
    WorkerSettings,
    WorkerWelcome,
)

_XCOMS = (XCom("k", b"1"),)
_EMITTED = Emitted(first=6, values=(b"7",), keys=(b"8",))
_SIGNALS = (SignalSend(key="k", value=b"8", dedup="d", namespace="n", is_of_run=True),)
_APPENDED = Appended(task_id="t", values=(b"8", b"9"), keys=(None, b"hash"), length_max=10)
_HANDLED = Handled(event_id=70001, count=3, state=b'{"n":3}')
_STREAM = StreamOptions(contract="batch", count=50, seconds=2.5, ahead=500, poison="skip", elements="each")
_RULE = SignalRule(
    key="k",
    namespace="n",
    predicate=Predicate(test="at_least", operand=b"3", path=("a",)),
    action="STOP",
    condition="necessary",
    since="last_run",
)
_DAG = DagSpec(
    dag_id="d",
    schedule=CronSchedule(cron="0 3 * * *", timezone="Europe/Berlin"),
    start_date_s=1.5,
    catchup=True,
    max_active_runs=2,
    tasks=(
        TaskSpec(
            task_id="t",
            operator="O",
            upstream=("s",),
            trigger_rule="all_done",
            retries=3,
            retry_delay_s=4.5,
            retry_exponential_backoff=True,
            max_retry_delay_s=5.5,
            execution_timeout_s=6.5,
            priority_weight=7,
            queue="q",
            pool="p",
            pool_slots=8,
            start_trigger=StartTrigger(
                classpath="a.B",
                kwargs=b"{}",
                next_method="m",
                next_kwargs=b'{"a":1}',
                timeout_s=9.5,
                stream=_STREAM,
                signal=SignalWait(
                    key="k",
                    namespace="n",
                    value=b"1",
                    since="latest",
                    predicate=Predicate(test="one_of", operand=b"[1]", path=("a", "b")),
                ),
                own=OwnArguments(names=("a", "b"), source=Listed(values=(b"1", b"[2]"))),
            ),
            map=MapSpec(
                source=Product(
                    (
                        Values(length=3),
                        Zip((Output(task_id="s", key="k"), Values(length=4)), is_longest=True),
                        Concat((Batch(Values(length=5), count=6), Elements(task_id="s"))),
                        Worklist(task_id="t", given=7, length_max=8, is_loop=True),
                    )
                ),
                window=10,
                fail_fast=True,
                failures_max=11,
                given_digest="0f",
            ),
            active_max=12,
            emits=True,
            group="g",
            signals=Rules(
                rules=(
                    SignalRule(
                        key="k",
                        namespace="n",
                        predicate=Predicate(test="one_of", operand=b"[1]", path=("a", "b")),
                        action="RESTART",
                        condition="necessary",
                        since="latest",
                    ),
                    TaskRule(task_id="s", state="failed", action="RESTART", condition="necessary"),
                    ClockRule(every_s=2.5, action="RESTART", condition="necessary"),
                    CronRule(cron="5 * * * *", timezone="Europe/Berlin", action="RESTART", condition="necessary"),
                ),
                overlap="each",
                stopped_as="failed",
                asks=True,
            ),
            endless=True,
        ),
    ),
    is_paused_upon_creation=True,
    description="words",
    tags=("x",),
    end_on=(_RULE,),
)
# One of each, and of each part that a message can have, every field apart from its default.
GOLDEN: dict[str, work.FromWorker | work.ToWorker] = {
    "WorkerHello": WorkerHello(protocol_version=3, pid=4711, headgate_version="0.1.0"),
    "StepLoaded": StepLoaded(token="a"),
    "DecideSignals": DecideSignals(
        token="a",
        task_instance_id=8,
        file="/dags/d.py",
        dag_id="d",
        run_id="r",
        task_id="t",
        try_number=2,
        signals=(StartSignal(key="k", namespace="n", version=5, value=b"1"),),
    ),
    "SignalsDecided": SignalsDecided(
        token="a", actions=("RESTART", "NONE"), error="Error", traceback="Traceback", more=True, is_unloaded=True
    ),
    "StepSucceeded": StepEnded(
        token="a",
        outcome=StepSucceeded(
            xcoms=_XCOMS, skips=("u",), handled=_HANDLED, emitted=_EMITTED, signals=_SIGNALS, appended=_APPENDED
        ),
        map_name="n",
        took_s=0.25,
        unfit="leaks",
    ),
    "StepSkipped": StepEnded(
        token="a",
        outcome=StepSkipped(
            reason="none", xcoms=_XCOMS, handled=_HANDLED, emitted=_EMITTED, signals=_SIGNALS, appended=_APPENDED
        ),
        map_name="n",
        took_s=0.25,
        unfit="leaks",
    ),
    "StepFailed": StepEnded(
        token="a",
        outcome=StepFailed(
            error="Error", traceback="Traceback", may_retry=False, xcoms=_XCOMS, handled=_HANDLED, emitted=_EMITTED
        ),
        map_name="n",
        took_s=0.25,
        unfit="leaks",
    ),
    "StepDeferred": StepEnded(
        token="a",
        outcome=StepDeferred(
            classpath="a.B",
            kwargs=b"{}",
            next_method="m",
            next_kwargs=b'{"a":1}',
            timeout_s=1.5,
            xcoms=_XCOMS,
            handled=_HANDLED,
            stream=_STREAM,
            emitted=_EMITTED,
            signals=_SIGNALS,
        ),
        map_name="n",
        took_s=0.25,
        unfit="leaks",
    ),
    "StepHandled": StepEnded(
        token="a",
        outcome=StepHandled(handled=_HANDLED, xcoms=_XCOMS, emitted=_EMITTED, signals=_SIGNALS, appended=_APPENDED),
        map_name="n",
        took_s=0.25,
        unfit="leaks",
    ),
    "StepNotBegun": StepEnded(token="a", outcome=StepNotBegun(reason="none"), map_name="n", took_s=0.25, unfit="leaks"),
    "StepsReturned": StepsReturned(tokens=("b", "c")),
    "FileParsed": FileParsed(
        file="/dag.py",
        dags=(_DAG,),
        error="Error",
        traceback="Traceback",
        more=True,
        source_digest="0f",
    ),
    "FileParsedAssets": FileParsed(
        file="/dag.py",
        dags=(
            msgspec.structs.replace(
                _DAG,
                schedule=AssetSchedule(assets=("s3://x",), contract="batch", batch_count=10, batch_seconds=11.5),
                tasks=(),
            ),
        ),
        error="Error",
        traceback="Traceback",
        more=True,
        source_digest="0f",
    ),
    "FileParsedSignals": FileParsed(
        file="/dag.py",
        dags=(
            msgspec.structs.replace(
                _DAG,
                schedule=SignalSchedule(
                    rules=(_RULE,),
                    contract="batch",
                    batch_count=10,
                    batch_seconds=11.5,
                ),
                tasks=(),
            ),
        ),
        error="Error",
        traceback="Traceback",
        more=True,
        source_digest="0f",
    ),
    "RequestXCom": Request(id=1, query=GetXCom(task_id="t", key="k", map_index=7)),
    "RequestXComs": Request(id=1, query=GetXComs(task_id="t", key="k", after=2, offset=3, limit=4, is_counted=False)),
    "RequestEmission": Request(id=6, query=EmitElements(first=1, values=(b"2",), keys=(b"3",))),
    "RequestVariable": Request(id=2, query=GetVariable(name="v")),
    "RequestConnection": Request(id=3, query=GetConnection(name="c")),
    "RequestStates": Request(id=4, query=GetTaskStates(dag_id="d", run_id="r", logical_date_s=1.5, task_ids=("t",))),
    "RequestRun": Request(id=5, query=CreateRun(dag_id="d", run_id="r", params=b"{}", logical_date_s=1.5)),
    "RequestSend": Request(id=7, query=SendSignals(signals=_SIGNALS, sender="a.B")),
    "RequestSignals": Request(id=8, query=ListSignals(key="k", namespace="n", after=1, limit=2, version=3)),
    "RequestListening": Request(id=9, query=ListenSignals(key="k", namespace="n", after=1, within_s=2.5)),
    "RequestStartSignals": Request(id=10, query=GetStartSignals()),
    "WorkerWelcome": WorkerWelcome(
        protocol_version=3, settings=WorkerSettings(frame_bytes_max=1, import_paths=("dags",), hook_timeout_s=2.5)
    ),
    "RunStep": RunStep(
        step=Step(
            token="a",
            task_instance_id=70000,
            file="/dag.py",
            dag_id="d",
            run_id="r",
            task_id="t",
            try_number=2,
            next_method="m",
            next_kwargs=b"{}",
            event=b"1",
            params=b'{"a":1}',
            logical_date_s=1.5,
            data_interval_s=(2.5, 3.5),
            asset_events=(AssetEvent(asset="s3://x", payload=b"2", stored_at_s=4.5),),
            ends_at_s=5.5,
            stream=StreamPart(
                handled=3,
                waiting=2,
                state=b'{"n":3}',
                events=(
                    StreamEvent(
                        id=70002,
                        trigger_run_id="1.2.3.4",
                        sequence_index=5,
                        payload=b"6",
                        key="k",
                        is_last=True,
                        stored_at_s=7.5,
                    ),
                ),
                is_over=True,
            ),
            map_index=8,
            emitted=9,
            map_length=10,
            is_of_signals=True,
            own=OwnValue(task_id="s", key="k", length=11, value=b"12"),
            traceparent="00-1-2-01",
            given_digest="0f",
        ),
        is_behind=True,
    ),
    "RecallSteps": RecallSteps(tokens=("b", "c")),
    "ParseFile": ParseFile(file="/dag.py"),
    "ResponseValue": Response(id=1, result=EncodedValue(value=b"1"), error="none"),
    "ResponseXComs": Response(id=1, result=XComPage(values=((3, b"1"), (4, None)), count=5, missing=6), error="none"),
    "ResponseRoom": Response(id=6, result=ElementRoom(room=7), error="none"),
    "ResponseSecret": Response(id=2, result=SecretText(value="s"), error="none"),
    "ResponseStates": Response(
        id=4,
        result=TaskStates(
            run_id="r", run_state="running", tasks=(("t", TaskState.DEFERRED),), missing=("u",), has_dag=False
        ),
        error="none",
    ),
    "ResponseSent": Response(id=7, result=SignalsSent(sent=(SentSignal(version=4, is_new=True),)), error="none"),
    "ResponseSignals": Response(
        id=8,
        result=SignalPage(signals=(StoredSignal(version=4, value=b"5", sender="s", sent_at_s=6.5, is_of_run=True),)),
        error="none",
    ),
    "ResponseHeard": Response(
        id=9,
        result=SignalsHeard(
            signals=(StoredSignal(version=4, value=b"5", sender="s", sent_at_s=6.5, is_of_run=True),), seen=7
        ),
        error="none",
    ),
    "ResponseStartSignals": Response(
        id=10,
        result=StartSignals(
            signals=(StartSignal(key="k", namespace="n", version=4, value=b"5"),),
            previous=(StartSignal(key="k", namespace="n", version=3, value=b"6"),),
            of_run=(StartSignal(key="k", namespace="n", version=2, value=b"7"),),
        ),
        error="none",
    ),
    "ResponseRun": Response(id=5, result=RunCreated(is_new=True), error="none"),
}


def test_the_golden_frames_hold_every_message_and_no_field_of_them_is_at_its_default() -> None:
    kinds = {*WORKER_WIRE.types[Role.WORKER], *WORKER_WIRE.types[Role.SUPERVISOR]}
    assert {type(message) for message in GOLDEN.values()} == kinds
    # DAGs that have a schedule by assets, or by signals, need no tasks here: the other one has them.
    assert fields_at_default(GOLDEN.values()) == [("DagSpec", "tasks")] * 2


@pytest.mark.parametrize("name", GOLDEN)
def test_the_wire_is_what_it_was(name: str) -> None:
    """Golden frames are added to, never changed; DAGs of this form are in databases as well."""
    check_golden(WORKER_WIRE, GOLDEN, name, "worker-messages-v3.txt")


def test_a_field_that_a_newer_peer_appended_is_skipped() -> None:
    parts = msgspec.msgpack.decode(encode_message(GOLDEN["RunStep"]))
    assert WORKER_WIRE.decode(Role.SUPERVISOR, msgspec.msgpack.encode([*parts, "new"])) == GOLDEN["RunStep"]
