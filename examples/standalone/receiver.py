"""Receives numbers until none has come for a while, and adds them up."""

import os
import sys

from marq.client import Service


def main(url: str) -> None:
    """Receive from the queue `numbers` of the worker at `url`."""
    total = count = 0
    with Service(url) as service:
        queue = service.queue("numbers")
        while messages := queue.receive_many(100, timeout=3):
            for message in messages:
                total += int(message.payload)
                count += 1
                message.ack()
    print(f"received {count}, sum {total}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("MARQ_URL", "http://localhost:9324"))
