"""Everything in one program: Kafka, a worker, a sender and a receiver that forgets the first delivery of one message.

.venv/bin/python -m examples.embedded
"""

import tempfile

from app.kafka.broker import EmbeddedBroker
from app.processes import WorkerProcess
from marq.client import Service


def main() -> None:
    """Send ten messages, lose one on the way, and get it again."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(folder) as broker:
        kafka = f"kafka://{broker.bootstrap}"
        with WorkerProcess(MARQ_KAFKA=kafka, MARQ_DATA_DIR=folder, MARQ_WEB_PORT="0") as worker:
            worker.wait_ready()
            with Service(worker.url) as service:
                queue = service.queue("greetings")
                for number in range(10):
                    queue.send(f"hello {number}".encode())
                done = 0
                while done < 10:
                    message = queue.receive(timeout=10, visibility_timeout=2)
                    if message is None:
                        raise SystemExit("nothing came within 10 seconds")
                    if message.payload == b"hello 3" and message.attempt == 1:
                        print("forgot", message.payload.decode())
                        continue
                    message.ack()
                    done += 1
                    print(f"got {message.payload.decode()}, attempt {message.attempt}")


if __name__ == "__main__":
    main()
