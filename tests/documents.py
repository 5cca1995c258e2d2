"""Tables of the documentation that are generated from the code, between two comments that name them.

``python -m tests.documents`` writes them; a test fails if they differ from the code.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from headgate.protocol.messages.dags import TaskState
from headgate.scheduling import states
from headgate.supervisor import setting_sources
from headgate.supervisor.metrics import catalogue

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DEFERRAL = DOCS / "deferral.md"

# The subject of each limit, and its name in the code, which gives the reason.
LIMITS = (
    ("the encoded kwargs of a trigger, or of a deferral", "headgate.protocol.messages.runner.KWARGS_BYTES_MAX"),
    ("one encoded payload (the setting `event_bytes_max`)", "headgate.protocol.messages.runner.EVENT_BYTES_MAX"),
    ("the key of an event", "headgate.protocol.messages.runner.KEY_CHARS_MAX"),
    ("the body of a response that `HttpTrigger` waits for", "headgate.triggers.http.BODY_BYTES_MAX"),
    ("the body of a page that `HttpPagesTrigger` reads", "headgate.triggers.http.PAGE_BYTES_MAX"),
    ("an error, and a traceback, as they are kept and shown", "headgate.protocol.messages.runner.ERROR_CHARS_MAX"),
    ("values within values", "headgate.protocol.values.DEPTH_MAX"),
    ("one encoded XCom", "headgate.protocol.messages.dags.XCOM_BYTES_MAX"),
    ("XComs pushed by one step of a task", "headgate.protocol.messages.dags.XCOMS_PER_STEP_MAX"),
    ("the key of an XCom", "headgate.protocol.messages.dags.XCOM_KEY_CHARS_MAX"),
    ("a dag_id, a task_id", "headgate.protocol.messages.dags.ID_CHARS_MAX"),
    ("the name of a queue, a pool, a run", "headgate.protocol.messages.dags.NAME_CHARS_MAX"),
    ("the classpath of a trigger", "headgate.protocol.messages.dags.CLASSPATH_CHARS_MAX"),
    ("any delay, and any timeout", "headgate.protocol.messages.dags.DURATION_S_MAX"),
    ("retries of a task", "headgate.protocol.messages.dags.RETRIES_MAX"),
    ("a priority_weight, either sign", "headgate.protocol.messages.dags.PRIORITY_MAX"),
    ("slots of a pool", "headgate.protocol.messages.dags.POOL_SLOTS_MAX"),
    ("tasks of a DAG", "headgate.protocol.messages.dags.TASKS_PER_DAG_MAX"),
    ("tasks right upstream of one", "headgate.protocol.messages.dags.UPSTREAM_PER_TASK_MAX"),
    ("an encoded DAG", "headgate.protocol.messages.dags.DAG_SPEC_BYTES_MAX"),
    ("active runs of a DAG, where it does not say", "headgate.protocol.messages.dags.DEFAULT_MAX_ACTIVE_RUNS"),
    ("active runs of a DAG, as much as it may say", "headgate.protocol.messages.dags.ACTIVE_RUNS_MAX"),
    ("assets of one schedule", "headgate.protocol.messages.dags.ASSETS_MAX"),
    ("asset events that one run is made for", "headgate.protocol.messages.dags.EVENTS_PER_RUN_MAX"),
    ("the payloads of these events together", "headgate.scheduling.contracts.PAYLOAD_BYTES_PER_RUN_MAX"),
    ("asset events that wait for the runs of one DAG", "headgate.store.triggers.assets.WAITING_EVENTS_MAX"),
    ("events of a stream handed to one step", "headgate.protocol.messages.task_streams.EVENTS_PER_STEP_MAX"),
    ("the payloads of these events together", "headgate.protocol.messages.task_streams.EVENT_BYTES_PER_STEP_MAX"),
    (
        "events of a stream that wait, if `ahead` is not given",
        "headgate.protocol.messages.task_streams.AHEAD",
    ),
    ("events of a stream that wait, as many as `ahead` may say", "headgate.protocol.messages.task_streams.AHEAD_MAX"),
    ("instances of one mapped task in one run", "headgate.protocol.messages.maps.INSTANCES_MAX"),
    ("unfinished instances of one, if `window` is not given", "headgate.protocol.messages.maps.DEFAULT_WINDOW"),
    ("unfinished instances of one, as many as `window` may say", "headgate.protocol.messages.maps.WINDOW_MAX"),
    ("lists and outputs that are zipped, joined or combined at once", "headgate.protocol.messages.maps.PARTS_MAX"),
    ("these within these", "headgate.protocol.messages.maps.DEPTH_MAX"),
    ("the key of a signal", "headgate.protocol.messages.signals.SIGNAL_KEY_CHARS_MAX"),
    ("the namespace of a signal", "headgate.protocol.messages.signals.NAMESPACE_CHARS_MAX"),
    ("the encoded value of a signal", "headgate.protocol.messages.signals.SIGNAL_BYTES_MAX"),
    ("signals that are sent at once", "headgate.protocol.messages.signals.SENDS_MAX"),
    ("versions of a key that are kept", "headgate.protocol.messages.signals.VERSIONS_KEPT_MAX"),
    ("keys of signals", "headgate.protocol.messages.signals.KEYS_MAX"),
    ("the time until a task that listens asks again", "headgate.protocol.messages.signals.LISTEN_S_MAX"),
    ("a DAG file", "headgate.tasks.parsing.FILE_BYTES_MAX"),
    ("DAGs in a file", "headgate.tasks.parsing.DAGS_PER_FILE_MAX"),
    ("DAG files of a folder", "headgate.supervisor.tasks.dag_files.FILES_MAX"),
    ("folders within folders of DAG files", "headgate.supervisor.tasks.dag_files.DEPTH_MAX"),
    ("a variable, or a connection", "headgate.store.tasks.values.VALUE_BYTES_MAX"),
    ("steps that a worker has at once", "headgate.protocol.messages.worker.BUNDLE_MAX"),
    ("the time that these took before, together, at most", "headgate.scheduling.bundles.BUNDLE_S"),
    ("the time of a step until those behind it go to others", "headgate.scheduling.bundles.RECALL_AFTER_S"),
    ("steps that a worker runs until it is replaced", "headgate.supervisor.executors.local.WORKER_STEPS_MAX"),
    ("the wait before an endless task begins on another worker", "headgate.store.tasks.outcomes.MOVE_WAIT_S"),
    ("this wait, doubled with each worker lost in a row", "headgate.store.tasks.outcomes.MOVE_WAIT_MAX_S"),
    ("the time of a step that is resumed to fail, at least", "headgate.supervisor.tasks.steps.FAIL_STEP_S"),
    ("triggers claimed in one transaction", "headgate.supervisor.triggers.leases.CLAIM_TRIGGERS_MAX"),
)
# The settings that concern deferrable tasks, in the order of the table.
SETTINGS = (
    *("dags_folder", "dags_look_s", "dag_parse_timeout_s", "import_paths", "pass_env"),
    *("workers", "endless_workers_max", "worker_memory_max_mib", "worker_grace_s"),
    *("capacity", "queues", "heartbeat_s", "lease_silence_max_s", "cut_off_exit_s", "poll_interval_s"),
    *("blocked_after_s", "cancel_grace_s", "hook_timeout_s", "drain_s"),
    *("log_folder", "task_log_bytes_max"),
)


def transitions() -> str:
    """Return the table of task states as Markdown."""
    head = ("From", "Event", "To", "trigger_id", "next_method", "By", "Action")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    order = list(TaskState)
    for row in states.TRANSITIONS:
        sources = ", ".join(state.value for state in sorted(row.from_, key=order.index))
        method = f"`{row.next_method}`" if row.next_method == states.FAIL_METHOD else row.next_method
        cells = (sources, f"`{row.event}`", row.to.value, row.trigger_id, method, row.by, row.action)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def limits() -> str:
    """Return the limits as Markdown."""
    rows = []
    for what, path in LIMITS:
        module, _, name = path.rpartition(".")
        value = _in_words(name, getattr(importlib.import_module(module), name))
        rows.append(f"| {what} | {value} | `{path.removeprefix('headgate.')}` |")
    return "\n".join(["| of | limit | named |", "|---|---|---|", *rows]) + "\n"


def settings() -> str:
    """Return these settings as Markdown, with their defaults and reasons."""
    defaults = setting_sources.resolve_settings(
        environ={"HOME": "/"}, cwd=Path("/"), flags={"home": Path("HOME")}
    ).settings
    values = {key: getattr(defaults, key) for key in SETTINGS} | {"import_paths": (".",)}  # made absolute, as all paths
    rows = [f"| `{key}` | {_default(value)} | {setting_sources.reason(key)} |" for key, value in values.items()]
    return "\n".join(["| setting | default | what it is for |", "|---|---|---|", *rows]) + "\n"


def metrics(measured: Sequence[catalogue.Metric] = catalogue.ALL) -> str:
    """Return what supervisors measure, or others, as Markdown."""
    rows = []
    for metric in measured:
        labels = ", ".join(f"`{name}`: {', '.join(values)}" for name, values in metric.labels)
        rows.append(f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(["| name | kind | labels | meaning |", "|---|---|---|---|", *rows]) + "\n"


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    DEFERRAL: {"transitions": transitions, "limits": limits, "settings": settings},
    DOCS / "metrics.md": {
        "metrics": metrics,
        "metrics of servers of signals": partial(metrics, catalogue.OF_SIGNAL_SERVERS),
    },
}


def written(path: Path) -> str:
    """Return a document with its tables as the code has them. Raises ValueError if one has no place in it."""
    text = path.read_text()
    for name, table in TABLES[path].items():
        place = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        body = table().replace("\\", r"\\")
        filled, places = place.subn(rf"\1\n{body}\n\2", text)
        if places != 1:
            raise ValueError(f"{places} places for the table {name!r}")
        text = filled
    return text


def _in_words(name: str, value: float) -> str:
    if "_BYTES_" in name:
        unit, size = ("MiB", 1024**2) if value >= 1024**2 else ("KiB", 1024)
        return f"{value / size:g} {unit}"
    if name.endswith("_S") or "_S_" in name:
        return f"{timedelta(seconds=value).days:,} days" if value >= 86_400 else f"{value:g} s"
    return f"{value:,} characters" if "_CHARS_" in name else f"{value:,}"


def _default(value: object) -> str:
    match value:
        case None:
            return "none"
        case Path():
            return f"`{str(value).removeprefix('/')}`"
        case tuple():
            return ", ".join(f"`{part}`" for part in value) or "none"
        case int() if value >= 1024**2:
            return f"{value // 1024**2} MiB"
        case _:
            return f"{value:,}" if isinstance(value, int) else f"{value:g}"


if __name__ == "__main__":
    for path in TABLES:
        path.write_text(written(path))
        print(f"wrote the tables of {path.relative_to(ROOT)}")
