"""Load a list that an HTTP API gives page by page, while the pages arrive, with one trigger for all of them.

Start it with ``headgate dags trigger load_pages``. A server that is enough for it, in a folder with the files
``users-1.json``, ``users-2.json`` and so on: ``python3 -m http.server 8765 --bind 127.0.0.1``. Each file is a page:
``{"users": [{"id": 1}, {"id": 2}], "next": "users-2.json"}``; the last one has no ``next``.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from headgate.tasks import DAG, BaseOperator, Batch, Context, task
from headgate.tasks.streaming import StreamedEvent
from headgate.triggers.http import HttpPagesTrigger

URL = "http://127.0.0.1:8765/users-1.json"
FOLDER = Path("loaded")  # within the folder that `headgate up` was started in


class LoadUsers(BaseOperator):
    """Writes the users of each page to a file, and returns how many they are."""

    def execute(self, context: Context) -> None:
        """Have the pages read, and handle up to 50 of them in a step, or those that have come after two seconds."""
        (FOLDER / context["run_id"]).mkdir(parents=True, exist_ok=True)
        trigger = HttpPagesTrigger(URL, rows="users", next="next")
        self.defer(trigger=trigger, stream=Batch(count=50, seconds=2), kwargs={"users": 0})

    def handle_trigger_events(self, events: Sequence[StreamedEvent], context: Context, users: int) -> dict[str, int]:
        """Write pages; ``users`` is what the step before has returned."""
        for event in events:
            rows = event.payload["rows"]
            users += len(rows)
            # A step whose process dies is repeated: the position names the page, so that it is not written twice.
            (FOLDER / context["run_id"] / f"{event.position}.json").write_text(json.dumps(rows))
            self.handled(event, users=users)  # a failure further on begins again behind this page
        return {"users": users}

    def stream_ended(self, context: Context, users: int) -> int:
        """Return the result, after the last page."""
        return users


with DAG("load_pages", description=f"Load the users of {URL}, page by page", tags=["example"]):
    load = LoadUsers(task_id="load", retries=3, retry_delay=timedelta(seconds=10))

    @task
    def report(users: int, run_id: str) -> None:
        """Say what was loaded."""
        print(f"{users} users on {len(list((FOLDER / run_id).iterdir()))} pages")

    report(load.output)
