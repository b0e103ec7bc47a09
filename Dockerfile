# The worker as a container beside the model's. `docker build -t inference-worker .`
FROM python:3.12-slim AS build
WORKDIR /build
COPY requirements.txt setup.cfg setup.py README.md ./
COPY inference_worker inference_worker
RUN python -m venv /opt/inference_worker \
 && /opt/inference_worker/bin/pip install --no-cache-dir -r requirements.txt \
 && /opt/inference_worker/bin/pip install --no-cache-dir --no-deps .

FROM python:3.12-slim
COPY --from=build /opt/inference_worker /opt/inference_worker
RUN useradd --system --no-create-home --shell /usr/sbin/nologin inference-worker
USER inference-worker
WORKDIR /run
ENV PATH=/opt/inference_worker/bin:$PATH PYTHONUNBUFFERED=1 LOG_FORMAT=json
# glibc keeps freed memory for each thread apart, 7 pieces of each size: with a thread a slot, memory rises for hours.
ENV GLIBC_TUNABLES=glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1
# Exec form: SIGTERM reaches Python, which drains for SHUTDOWN_GRACE_S (25 s). Raise Docker's 10 s: `stop_grace_period: 40s`.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-m", "inference_worker", "--healthcheck"]
ENTRYPOINT ["python", "-m", "inference_worker"]
