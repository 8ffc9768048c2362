# A worker of marq, for a Kafka that runs elsewhere. "Deploy" in the README says how it is used.
#
#   docker build -t marq .
#   docker run -e MARQ_KAFKA=kafka://broker:9092 -e MARQ_KEYS=… -p 9324:9324 marq

ARG BASE=python:3.13-slim

FROM ${BASE} AS build
WORKDIR /opt/marq
RUN python3 -m venv venv
COPY requirements/worker.txt requirements/
# Only files whose hash is in the lock; nothing is built.
RUN venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
        --only-binary :all: -r requirements/worker.txt
COPY . .
RUN venv/bin/python -m compileall -q agents app gateway marq tables

FROM ${BASE}
COPY --from=build /opt/marq /opt/marq
# No name is needed for the user, so none is made: any other number will do, if it can write to /data.
RUN mkdir -p /data /handlers && chown 10001:10001 /data
USER 10001:10001
# Handlers of yours are modules in /handlers: a volume, or a child image (MARQ_HANDLERS names them).
ENV PATH=/opt/marq/venv/bin:$PATH \
    PYTHONPATH=/opt/marq:/handlers \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/data \
    MARQ_DATA_DIR=/data \
    MARQ_WEB_HOST=0.0.0.0 \
    MARQ_WEB_PORT=9324
WORKDIR /data
VOLUME /data
EXPOSE 9324
# 90 s: a worker may wait for its Kafka for 60 s.
HEALTHCHECK --interval=10s --timeout=5s --start-period=90s --retries=3 \
    CMD ["python", "/opt/marq/docker/health_check.py"]
ENTRYPOINT ["python", "-m", "app"]
CMD ["worker"]
