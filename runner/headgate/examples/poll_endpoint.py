"""Poll an HTTP endpoint until it answers with 200, then work with what it said.

Start it with ``headgate dags trigger poll_endpoint``; ``python -m http.server 8765`` in a folder with a file
``report.json`` is enough of a server.
"""

from datetime import timedelta
from typing import Any

from headgate.tasks import DAG, HttpSensor, task

URL = "http://127.0.0.1:8765/report.json"

with DAG("poll_endpoint", description=f"Wait for {URL}"):
    # Until there is a server, and until it has the file, requests fail: a hundred of them in a row are allowed.
    wait = HttpSensor(
        task_id="wait", url=URL, poke_interval=timedelta(seconds=1), tries_max=100, timeout=timedelta(hours=1)
    )

    @task(retries=2, retry_delay=timedelta(seconds=10))
    def use(answer: dict[str, Any]) -> str:
        """``answer`` is what the sensor's trigger fired: status, headers and body of the response."""
        print(f"the server said {answer['status']}: {answer['body']}")
        return str(answer["body"])

    use(wait.output)
