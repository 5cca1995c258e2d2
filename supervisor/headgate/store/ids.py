"""Types of the store's row ids: to a type checker no two of them are the same, at run time they are integers.

The names that people give (of DAGs, of runs, of a DAG's tasks) are strings, and are called ``dag``, ``run_id`` and
``task_id``. A parameter that takes one of the ids below is called ``instance``, ``dag_row``, ``dag_run`` and so on.
"""

from __future__ import annotations

from typing import NewType

Epoch = NewType("Epoch", int)  # one lease of one supervisor: the id of a row of ``triggerer``
TriggerId = NewType("TriggerId", int)
DagRowId = NewType("DagRowId", int)
DagRunId = NewType("DagRunId", int)
TaskInstanceId = NewType("TaskInstanceId", int)
