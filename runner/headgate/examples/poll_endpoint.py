"""Poll an HTTP endpoint until it answers with 200, then work with what it said.

Start it with ``headgate dags trigger poll_endpoint``. A server that is enough for it, in a folder with a file
``report.json``: ``python3 -m http.server 8765 --bind 127.0.0.1``.
"""

from datetime import timedelta
from typing import Any

from headgate.tasks import DAG, HttpSensor, task

URL = "http://127.0.0.1:8765/report.json"

with DAG("poll_endpoint", description=f"Wait for {URL}", tags=["example"]):
    # Until there is a server, requests fail, and a thousand of them in a row are allowed. That the server does not have
    # the file yet (404) is no failure.
    wait = HttpSensor(
        task_id="wait", url=URL, poke_interval=timedelta(seconds=1), tries_max=1000, timeout=timedelta(hours=1)
    )

    @task(retries=2, retry_delay=timedelta(seconds=10))
    def use(answer: dict[str, Any]) -> str:
        """``answer`` is what the sensor's trigger fired: status, headers and body of the response."""
        body = str(answer["body"]).strip()
        print(f"the server said {answer['status']}: {body}")
        return body

    use(wait.output)
