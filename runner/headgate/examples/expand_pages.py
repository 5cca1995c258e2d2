"""Work on each user of a list that an HTTP API gives page by page, beginning with the first while the others arrive.

Start it with ``headgate dags trigger expand_pages``, beside the server that ``load_pages.py`` describes.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urljoin
from urllib.request import urlopen

from headgate.tasks import DAG, BaseOperator, Batch, Context, Loop, task, task_group, worklist
from headgate.tasks.streaming import StreamedEvent
from headgate.triggers.http import HttpPagesTrigger

URL = "http://127.0.0.1:8765/users-1.json"
FOLDER = Path("expanded")  # within the folder that `headgate up` was started in


class EachUser(BaseOperator):
    """Emits each user, for the tasks that are expanded over its output."""

    emits = True

    def execute(self, context: Context) -> None:
        """Have the pages read."""
        trigger = HttpPagesTrigger(URL, rows="users", next="next")
        self.defer(trigger=trigger, stream=Batch(count=50, seconds=1), kwargs={"users": 0})

    def handle_trigger_events(self, events: Sequence[StreamedEvent], context: Context, users: int) -> dict[str, int]:
        """Emit the users of some pages; they are stored together with the place of the stream."""
        for event in events:
            for user in event.payload["rows"]:
                self.emit(user)
            users += len(event.payload["rows"])
            self.handled(event, users=users)  # a failure further on emits nothing of this page again
        return {"users": users}

    def stream_ended(self, context: Context, users: int) -> int:
        """Return the result, after the last page."""
        return users


def read_page(url: str) -> dict[str, Any]:
    """Return one page of the API."""
    with urlopen(url, timeout=30) as answer:
        page: dict[str, Any] = json.load(answer)
    return page


with DAG("expand_pages", description=f"Work on each user of {URL}", tags=["example"]):
    users = EachUser(task_id="users", retries=3, retry_delay=timedelta(seconds=10))

    @task(retries=2, max_active_tis_per_dagrun=4)
    def enrich(user: dict[str, Any], region: str) -> dict[str, Any]:
        """Work on one user."""
        return {**user, "region": region}

    @task
    def save(batch: list[dict[str, Any]], run_id: str, ti: Any) -> None:
        """Write some users to a file; the index names the batch."""
        (FOLDER / run_id).mkdir(parents=True, exist_ok=True)
        (FOLDER / run_id / f"{ti.map_index}.json").write_text(json.dumps(batch))

    @task
    def report(enriched: Sequence[dict[str, Any]]) -> int:
        """Count what the others have left; it is read by pages, and never all in memory."""
        return sum(user["region"] == "north" for user in enriched)

    enriched = enrich.partial(region="north").expand(user=users.output, window=100)  # begins with the first user
    save.expand(batch=users.output.batch(10))
    report(enriched)  # begins after the last

    @task(retries=2, max_active_tis_per_dagrun=2)
    def follow(url: str, ti: Any) -> int:
        """Count the users of one page, and append the page that it links to: nobody knows before how many there are."""
        page = read_page(url)
        if page.get("next"):
            ti.append(urljoin(url, page["next"]), key=page["next"])
        return len(page["users"])

    @task
    def add_up(counts: Sequence[int]) -> int:
        """Add up the users of all pages."""
        return sum(counts)

    add_up(follow.expand(url=worklist([URL], max_length=10_000)))

    @task_group
    def settle() -> None:
        """Look at the first page once more, until it is the same as the time before."""

        @task
        def look(*, loop: Loop) -> dict[str, Any]:
            users = read_page(URL)["users"]
            return {"users": users, "is_same": loop.index > 0 and users == loop.previous["users"]}

        look()

    def is_settled(*, loop: Loop) -> bool:
        """Say whether that is enough; else there is another iteration."""
        return bool(loop.result["is_same"])

    settle.loop(max_iterations=10, until=is_settled)
