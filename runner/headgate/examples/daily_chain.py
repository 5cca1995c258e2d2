"""A chain that runs every day, with a sensor of its own in the middle.

``extract`` begins the day's file, ``complete`` waits until somebody has put a ``.done`` beside it, and ``report`` goes
on from there. It begins by itself: the first run is that of the last day that is over. Another one, now:
``headgate dags trigger daily_chain``.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from headgate.tasks import DAG, BaseSensorOperator, Context, task

FOLDER = Path("days")  # within the folder that `headgate up` was started in


class DayIsComplete(BaseSensorOperator):
    """Looks for the day's ``.done``; between two looks it holds no worker."""

    def poke(self, context: Context) -> bool:
        """Say whether it is there."""
        return Path(context["ti"].xcom_pull("extract")).with_suffix(".done").exists()


with DAG("daily_chain", schedule="@daily", start_date=datetime(2026, 1, 1, tzinfo=UTC), tags=["example"]):

    @task
    def extract(run_id: str) -> str:
        """Write the day's file; its path goes to the tasks below."""
        FOLDER.mkdir(exist_ok=True)
        path = FOLDER / f"{run_id.replace(':', '-')}.txt"
        path.write_text("twelve orders\n")
        print(f"wrote {path}; the chain waits for {path.with_suffix('.done')}")
        return str(path)

    complete = DayIsComplete(
        task_id="complete", poke_interval=timedelta(seconds=5), timeout=timedelta(hours=20), retries=1
    )

    @task
    def report(path: str) -> None:
        """Say what the day brought."""
        print(f"{path}: {Path(path).read_text().strip()}")

    begun = extract()
    begun >> complete >> report(begun)
