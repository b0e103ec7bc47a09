"""Builds every object from the `Config` and hands each what it needs. No decision is made here.

Main thread, once. The only file that knows all others.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from queue import SimpleQueue

from inference_worker import __version__, amqp_connection, redis_client
from inference_worker.amqp_topology import TopologyNames
from inference_worker.cancel_watch import CancelWatch
from inference_worker.config import Config
from inference_worker.deadlines import Bounded, Deadlines
from inference_worker.errors import HttpError
from inference_worker.health_checker import HealthChecker, HealthSettings
from inference_worker.holds import Holds
from inference_worker.http_client import HttpClient
from inference_worker.kept_answers import KeptAnswers
from inference_worker.message_processor import MessageProcessor, ProcessorSettings
from inference_worker.message_publisher import MessagePublisher
from inference_worker.metrics_buffer import MAX_USAGE_EVENTS, MAX_USAGE_EVENTS_ON_DISK, MetricsBuffer
from inference_worker.metrics_reporter import MetricsReporter, ReporterSettings
from inference_worker.metrics_scraper import token_progress
from inference_worker.model_client import ModelClient, ModelSettings
from inference_worker.result_store import ResultStore
from inference_worker.rmq_listener import RmqListener
from inference_worker.slots import Slots
from inference_worker.status_server import StatusServer
from inference_worker.stream_store import StreamStore
from inference_worker.supervisor import ExitCode, Parts, Supervisor
from inference_worker.usage_outbox import UsageOutbox
from inference_worker.usage_sender import UsageSender, UsageSettings

logger = logging.getLogger(__name__)

#: Python lets a thread keep its lock for 5 ms while others wait; with 64 slots the listener waited, so the model did
_SWITCH_INTERVAL_S = 0.0005
#: probes, scrapes and the sinks' answers: a vLLM page has 50 kB
_SIDE_RESPONSE_BYTES = 8 * 2**20
#: a further outage of Redis may begin before all answers of the one before have been asked for
_KEPT_PER_SLOT = 4


def topology_names(config: Config) -> TopologyNames:
    """Name what is declared at the broker."""
    broker = config.broker
    return TopologyNames(config.identity.queue, broker.queue_type, broker.dlx, broker.dlq, broker.dlx_routing_key)


def open_stores(config: Config) -> tuple[ResultStore, StreamStore]:
    """Make what keeps results and streams; they connect at their first command."""
    store = config.store
    for_results, for_streams = (
        redis_client.open_client(
            store.url,
            password=store.password,
            timeout_s=store.timeout_s,
            retry_count=retry_count,
        )
        for retry_count in (1, 0)
    )
    results = ResultStore(for_results, ttl_s=store.ttl_s, replica_id=config.identity.replica_id)
    return results, StreamStore(for_streams, ttl_s=store.ttl_s)


def _count_tokens(config: Config, http: HttpClient) -> float | None:
    try:
        page = http.exchange("GET", config.metrics.vllm_url, timeout_s=config.health.timeout_s)
    except HttpError:
        return None
    return token_progress(page.body.decode(errors="replace")) if page.status_code == 200 else None


def _health_settings(config: Config) -> HealthSettings:
    return HealthSettings(
        interval_s=config.health.interval_s,
        store_retry_delay_s=config.store.retry_delay_s,
        failure_threshold=config.health.failure_threshold,
        success_threshold=config.health.success_threshold,
        stall_timeout_s=config.health.stall_timeout_s,
    )


def _model_settings(config: Config) -> ModelSettings:
    model = config.model
    return ModelSettings(
        infer_url=model.base_url + model.infer_path,
        timeout_s=model.infer_timeout_s,
        max_response_bytes=model.max_response_bytes,
        api_key=model.api_key,
        retry_status_codes=model.retry_status_codes,
        ttft_header=model.ttft_header,
        tbt_header=model.tbt_header,
    )


def _processor_settings(config: Config) -> ProcessorSettings:
    identity = config.identity
    return ProcessorSettings(
        max_retries=config.retry.max_retries,
        max_redeliveries=config.retry.max_redeliveries,
        respects_deadline=config.model.respects_deadline,
        looks_for_cancels=config.model.cancel_poll_interval_s > 0,
        deployment_id=identity.deployment_id,
        replica_id=identity.replica_id,
        user_id=identity.user_id,
        org_id=identity.org_id,
        model_id=identity.model_id,
    )


def _reporter_settings(config: Config) -> ReporterSettings:
    identity = config.identity
    return ReporterSettings(
        deployment_id=identity.deployment_id,
        replica_id=identity.replica_id,
        user_id=identity.user_id,
        org_id=identity.org_id,
        model=identity.model_id,
        worker_version=__version__,
        metrics_url=config.metrics.server_url + "/metrics",
        metrics_token=config.metrics.service_token,
        flush_interval_s=config.metrics.flush_interval_s,
        http_timeout_s=config.metrics.http_timeout_s,
        vllm_metrics_url=config.metrics.vllm_url,
        dcgm_metrics_url=config.metrics.dcgm_url,
    )


def _usage_settings(config: Config) -> UsageSettings:
    return UsageSettings(
        events_url=config.billing.croesus_url + "/events",
        events_token=config.billing.service_token,
        http_timeout_s=config.metrics.http_timeout_s,
        batch_size=config.billing.batch_size,
    )


def _open_buffer(config: Config, *, on_half_full: Callable[[], None]) -> MetricsBuffer:
    outbox_path = config.billing.outbox_path
    return MetricsBuffer(
        max_records=config.metrics.buffer_size,
        max_usage_events=MAX_USAGE_EVENTS_ON_DISK if outbox_path else MAX_USAGE_EVENTS,
        on_half_full=on_half_full,
        outbox=UsageOutbox(outbox_path) if outbox_path else None,
    )


def _watch_cancels(config: Config, deadlines: Deadlines, store: ResultStore) -> CancelWatch | None:
    interval_s = config.model.cancel_poll_interval_s
    if interval_s == 0:
        return None
    watch = CancelWatch(interval_s=interval_s, deadlines=deadlines, find_cancelled=store.find_cancelled)
    watch.start()
    return watch


def run(config: Config, signals: SimpleQueue[int]) -> ExitCode:
    """Build the worker and run it until it is told to stop."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    holds, deadlines = Holds(), Deadlines()
    identity, model, broker = config.identity, config.model, config.broker
    names = topology_names(config)
    side_http = HttpClient(deadlines, Bounded.SIDE_CALL, max_response_bytes=_SIDE_RESPONSE_BYTES)
    store, streams = open_stores(config)
    health = HealthChecker(
        _health_settings(config),
        holds=holds,
        probe_model=lambda: (
            side_http.exchange(
                "GET", model.base_url + config.health.path, timeout_s=config.health.timeout_s
            ).status_code
        ),
        probe_store=store.probe,
        count_tokens=lambda: _count_tokens(config, side_http),
        count_in_work=lambda: slots.in_work_count,
    )
    buffer = _open_buffer(config, on_half_full=lambda: reporter.flush_soon())

    def connect(purpose: str) -> object:
        name = f"inference_worker {identity.deployment_id} {identity.replica_id} {purpose}"
        return amqp_connection.open_connection(broker, name=name)

    processor = MessageProcessor(
        _processor_settings(config),
        model=ModelClient(
            _model_settings(config),
            HttpClient(deadlines, Bounded.MODEL_CALL, max_response_bytes=model.max_response_bytes),
        ),
        store=store,
        streams=streams,
        publisher=MessagePublisher(
            lambda: connect("copies"), deadlines, queue=names.queue, dlx=names.dlx, dlx_key=names.dlx_routing_key
        ),
        health=health,
        buffer=buffer,
        holds=holds,
        kept=KeptAnswers(max_count=_KEPT_PER_SLOT * broker.prefetch),
        hand_in=lambda settlement: listener.hand_in(settlement),
    )
    slots = Slots(broker.prefetch, processor.process)
    listener = RmqListener(
        names,
        connect=lambda: connect("consumer"),
        prefetch=broker.prefetch + broker.lookahead,
        holds=holds,
        slots=slots,
        deadlines=deadlines,
    )
    # the health thread lifts the holds that end by themselves, and may sleep for a whole interval otherwise
    holds.watch(listener.wake, health.wakeup.set)
    reporter = MetricsReporter(
        settings=_reporter_settings(config),
        buffer=buffer,
        usage=UsageSender(_usage_settings(config), buffer=buffer, http=side_http),
        http=side_http,
        health=lambda: health.snapshot,
        queue_depth=listener.queue_depth,
    )
    cancel_watch = _watch_cancels(config, deadlines, store)
    supervisor = Supervisor(
        Parts(listener=listener, health=health, reporter=reporter, slots=slots),
        signals=signals,
        holds=holds,
        deadlines=deadlines,
        cut_off=processor.cut_off.set,
        grace_s=config.process.grace_s,
        helpers={
            "stream-writer": lambda: streams.is_alive,
            "cancel-watch": lambda: cancel_watch is None or cancel_watch.is_alive,
        },
    )
    StatusServer(
        config.process.http_host,
        config.process.http_port,
        is_alive=supervisor.is_alive,
        state=lambda: listener.state,
        holds=holds,
    ).start()
    extra = {
        "event": "started",
        "version": __version__,
        "deployment_id": identity.deployment_id,
        "replica_id": identity.replica_id,
        "prefetch": broker.prefetch,
    }
    # 50,000 objects that live as long as the process: looking through them took 10 ms, in the middle of a request
    gc.freeze()
    logger.info("inference_worker %s starts", __version__, extra=extra)
    return supervisor.run()
