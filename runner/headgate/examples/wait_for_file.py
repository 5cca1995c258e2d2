"""Wait for a file without holding a worker, then read it.

Start it with ``headgate dags trigger wait_for_file``; it goes on when a CSV file stands in the folder ``inbox``, which
need not exist before. Relative paths are within the folder that ``headgate up`` was started in.
"""

import csv
from datetime import timedelta
from typing import Any

from headgate.tasks import DAG, FileSensor, task

with DAG("wait_for_file", description="Count the rows of the first CSV file in inbox/", tags=["example"]):
    wait = FileSensor(task_id="wait", filepath="inbox/*.csv", poke_interval=timedelta(seconds=1))

    @task
    def count_rows(found: dict[str, Any]) -> int:
        """``found`` is what the sensor's trigger fired: path, size and time of the file."""
        with open(found["path"], newline="") as file:
            rows = len(list(csv.DictReader(file)))
        print(f"{found['path']} has {rows} rows")
        return rows

    count_rows(wait.output)
