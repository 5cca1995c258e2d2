"""Train a model each time a job that never ends by itself has new data, until a signal ends both.

Start it with ``headgate dags trigger train_on_signals``, and end it with
``headgate signals send drain --run train_on_signals latest``.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headgate.signals import STOP, On, SignalService, SignalVersion, TaskEnded, at_least
from headgate.tasks import DAG, task

FOLDER = Path("samples")  # within the folder that `headgate up` was started in
EPOCH_S = 5.0  # the time that it takes to have new data
DRAIN = On("drain", action=STOP)

with DAG("train_on_signals", description="Train on new data until a signal ends it", tags=["example"]):

    @task(endless=True, signals=[DRAIN])
    def ingest(run_id: str) -> None:
        """Gather samples for ever, and send a signal for each epoch of them, to this run alone."""
        folder = FOLDER / run_id
        folder.mkdir(parents=True, exist_ok=True)
        # On another worker it goes on with the last one, whose signal may not have been sent.
        epoch = max(0, len(list(folder.glob("*.json"))) - 1)
        while True:
            epoch += 1
            draft = folder / f"{epoch}.draft"
            draft.write_text(json.dumps([epoch * number for number in range(100)]))
            draft.rename(folder / f"{epoch}.json")
            SignalService().send_signal("epoch", epoch, dedup=f"{run_id} {epoch}", of_run=True)
            time.sleep(EPOCH_S)

    @task(signals=[On("epoch", at_least(2)), DRAIN])
    def train(
        run_id: str, signals: Sequence[SignalVersion], previous_signals: Sequence[SignalVersion]
    ) -> dict[str, Any]:
        """Train on the newest epoch. Those that come meanwhile start it once more, with the newest of them."""
        # A start by hand, `headgate tasks start train_on_signals latest train`, has no signals.
        epoch = signals[0].value if signals else max(int(path.stem) for path in (FOLDER / run_id).glob("*.json"))
        samples = json.loads((FOLDER / run_id / f"{epoch}.json").read_text())
        before = previous_signals[0].value if previous_signals else None
        return {"epoch": epoch, "before": before, "mean": sum(samples) / len(samples)}

    @task(signals=[On(TaskEnded("train", "success"))])
    def publish(model: dict[str, Any]) -> int:
        """Publish the model, each time there is one."""
        return int(model["epoch"])

    ingest()
    publish(train())
