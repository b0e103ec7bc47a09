"""The text of a Prometheus page → the numbers that we report.

Pure: any thread, no I/O; a `ModelScraper` belongs to one thread at a time. The only file that knows
prometheus_client.parser, and the only one that knows what vLLM, SGLang, TGI and DCGM call their metrics.

Rules, the same for every number:
- Several series of one name (`engine` labels) make one number: counts add up, a ratio is their mean, so it stays
  within 0 to 1.
- A number is known only when each of its series is a finite, non-negative number: the sum of the engines that happen to
  be readable would look like a drop. Else it is None, never 0.
- Of several names for one thing the first that is known counts: new before old.
- A line that cannot be read costs its own number, and no other.

Sources: design section 10; Prometheus text format 0.0.4 and OpenMetrics 1.0; field reports R68-R70, R72.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from inference_worker.documents import GpuMetrics, ModelMetrics

# -- names ------------------------------------------------------------------------------------------------------------

_Names = tuple[str, ...]

_KV_CACHE_USAGE: _Names = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",  # before vLLM 0.12
    "sglang:token_usage",
)
_REQUESTS_RUNNING: _Names = ("vllm:num_requests_running", "sglang:num_running_reqs", "tgi_batch_current_size")
_REQUESTS_WAITING: _Names = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "tgi_queue_size")
_PREEMPTIONS: _Names = (
    "vllm:num_preemptions_total",
    # not the gauge sglang:num_retracted_reqs, which goes back to 0: no total
    "sglang:num_retracted_requests_total",
    "sglang:num_retracted_reqs_total",
)
_PROMPT_TOKENS: _Names = (
    "vllm:prompt_tokens_total",
    "sglang:prompt_tokens_total",
    "tgi_request_input_length_sum",
)
_GENERATION_TOKENS: _Names = (
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
    "tgi_request_generated_tokens_sum",
)
#: queries and hits, in tokens. vllm:external_prefix_cache_* and vllm:mm_cache_* are other caches
_PREFIX_CACHE: tuple[tuple[str, str], ...] = (
    ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    ("vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total"),
    ("vllm:gpu_prefix_cache_queries", "vllm:gpu_prefix_cache_hits"),
)
#: for servers without the counters
_PREFIX_CACHE_HIT_RATE: _Names = ("sglang:cache_hit_rate", "vllm:gpu_prefix_cache_hit_rate")

# -- lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Series:
    """One line. `value` is None when it is no finite, non-negative number, or when the line cannot be read."""

    labels: Mapping[str, str]
    value: float | None


_Page = dict[str, list[_Series]]


def _line_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Match a line of one of these names: of a vLLM page of 50 kB 1 kB matters, and parsing the rest takes 10 ms."""
    return re.compile(rf"^[ \t]*({'|'.join(map(re.escape, names))})[ \t]*[ \t{{][^\n]*", re.MULTILINE)


def _read_page(text: str, pattern: re.Pattern[str]) -> _Page:
    page: _Page = {}
    for match in pattern.finditer(text):
        page.setdefault(match.group(1), []).append(_read_line(match.group()))
    return page


def _read_line(line: str) -> _Series:
    """Parse one line by itself: the parser is a lazy generator that gives up the whole page at one bad line (R68).

    Without the page's TYPE lines it leaves names as they are; it would rename a counter that does not end in `_total`.
    """
    try:
        samples = [sample for family in text_string_to_metric_families(line) for sample in family.samples]
        return _Series(samples[0].labels, _to_amount(samples[0].value))
    except (ValueError, IndexError, OverflowError):
        # IndexError: a label without a name; OverflowError: a time stamp of 400 digits. Neither is documented
        return _Series({}, None)


def _to_amount(value: float) -> float | None:
    # the parser gives an int for digits alone, of any length
    amount = float(value)
    return amount if math.isfinite(amount) and amount >= 0 else None


# -- the model server -------------------------------------------------------------------------------------------------


def _known(page: _Page, names: _Names, combine: Callable[[Sequence[float]], float | None]) -> float | None:
    for name in names:
        values = [series.value for series in page.get(name, ())]
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            combined = combine(known)
            if combined is not None:
                return combined
    return None


def _sum(values: Sequence[float]) -> float | None:
    total = sum(values)
    return total if math.isfinite(total) else None


def _mean_ratio(values: Sequence[float]) -> float | None:
    return fmean(values) if max(values) <= 1 else None


_MODEL_LINE = _line_pattern(
    (
        *_KV_CACHE_USAGE,
        *_REQUESTS_RUNNING,
        *_REQUESTS_WAITING,
        *_PREEMPTIONS,
        *_PROMPT_TOKENS,
        *_GENERATION_TOKENS,
        *(name for pair in _PREFIX_CACHE for name in pair),
        *_PREFIX_CACHE_HIT_RATE,
    )
)
_TOKEN_LINE = _line_pattern((*_PROMPT_TOKENS, *_GENERATION_TOKENS))


@dataclass(frozen=True, slots=True)
class _CacheCounters:
    """Totals since the model server started, in tokens."""

    queries: float = 0.0
    hits: float = 0.0

    def since(self, before: _CacheCounters) -> _CacheCounters:
        """What came since `before`; all of it when a counter went back, since then the server began anew (R72)."""
        if self.queries < before.queries or self.hits < before.hits:
            return self
        return _CacheCounters(self.queries - before.queries, self.hits - before.hits)


class ModelScraper:
    """Reads one model server's page after page. Owned by the thread that scrapes."""

    def __init__(self) -> None:
        # zeros, so that the first difference is the whole time since the server started
        self._cache_counters = _CacheCounters()

    def read(self, text: str) -> ModelMetrics | None:
        """Read one page; None when it has no series that we know. Raises nothing, whatever the text."""
        page = _read_page(text, _MODEL_LINE)
        if not page:
            return None
        return ModelMetrics(
            kv_cache_usage=_known(page, _KV_CACHE_USAGE, _mean_ratio),
            requests_running=_known(page, _REQUESTS_RUNNING, _sum),
            requests_waiting=_known(page, _REQUESTS_WAITING, _sum),
            preemptions_total=_known(page, _PREEMPTIONS, _sum),
            prompt_tokens_total=_known(page, _PROMPT_TOKENS, _sum),
            generation_tokens_total=_known(page, _GENERATION_TOKENS, _sum),
            prefix_cache_hit_rate=self._read_hit_rate(page),
        )

    def _read_hit_rate(self, page: _Page) -> float | None:
        counters = _read_cache_counters(page)
        if counters is None:
            # a page without the counters says nothing about them: the ones we know stay (R72)
            return _known(page, _PREFIX_CACHE_HIT_RATE, _mean_ratio)
        fresh = counters.since(self._cache_counters)
        self._cache_counters = counters
        return fresh.hits / fresh.queries if fresh.queries > 0 and fresh.hits <= fresh.queries else None


def _read_cache_counters(page: _Page) -> _CacheCounters | None:
    for queries_name, hits_name in _PREFIX_CACHE:
        queries, hits = _known(page, (queries_name,), _sum), _known(page, (hits_name,), _sum)
        if queries is not None and hits is not None:
            return _CacheCounters(queries, hits)
    return None


def token_progress(text: str) -> float | None:
    """Add up the tokens read and generated since the model server started; None when it counts neither.

    For telling whether a busy model moves at all: any change is movement, a reset to 0 included (R72).
    """
    page = _read_page(text, _TOKEN_LINE)
    counts = [_known(page, names, _sum) for names in (_PROMPT_TOKENS, _GENERATION_TOKENS)]
    known = [count for count in counts if count is not None]
    return _sum(known) if known else None


# -- the GPUs ---------------------------------------------------------------------------------------------------------

#: DCGM prints "no value" as 0x7ffffff0 (32 bits), 0x7ffffffffffffff0 (64 bits) or 2**47 (float), each up to 3 more for
#: the reason, or as 2**32 - 1; nothing that we read, in its unit, comes near the least of them (R70)
_NO_VALUE_FROM = 0x7FFFFFF0
_BYTES_PER_MIB = 1024 * 1024


def _percent_to_ratio(percent: float) -> float | None:
    return percent / 100 if percent <= 100 else None


def _mib_to_bytes(mib: float) -> int:
    return int(mib * _BYTES_PER_MIB)


_GPU_FIELDS: dict[str, tuple[str, Callable[[float], float | int | None]]] = {
    "DCGM_FI_DEV_GPU_UTIL": ("utilization", _percent_to_ratio),
    "DCGM_FI_DEV_FB_USED": ("memory_used_bytes", _mib_to_bytes),
    "DCGM_FI_DEV_FB_FREE": ("memory_free_bytes", _mib_to_bytes),
    "DCGM_FI_DEV_POWER_USAGE": ("power_w", float),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature_c", float),
}
_GPU_LINE = _line_pattern(_GPU_FIELDS)


def read_gpus(text: str) -> list[GpuMetrics]:
    """Read a DCGM exporter's page: one entry a GPU, in the page's order. Raises nothing, whatever the text.

    A MIG instance is an entry of its own, `gpu` "0/7" for instance 7 of GPU 0: its memory is not the GPU's. Of several
    series for one GPU (one for each pod that shares it) the first known value counts: they all tell of the same GPU.
    """
    gpus: dict[tuple[str | None, str | None], dict[str, Any]] = {}
    for name, lines in _read_page(text, _GPU_LINE).items():
        field, convert = _GPU_FIELDS[name]
        for series in lines:
            gpu = gpus.setdefault(_gpu_key(series.labels), {})
            if series.value is not None and series.value < _NO_VALUE_FROM and gpu.get(field) is None:
                gpu[field] = convert(series.value)
    # a line that could not be read, or without labels, names no GPU
    gpus.pop((None, None), None)
    return [GpuMetrics(gpu=gpu, uuid=uuid, **fields) for (gpu, uuid), fields in gpus.items()]


def _gpu_key(labels: Mapping[str, str]) -> tuple[str | None, str | None]:
    gpu, uuid = labels.get("gpu") or None, labels.get("UUID") or labels.get("uuid") or None
    instance = labels.get("GPU_I_ID")
    return (f"{gpu or ''}/{instance}" if instance else gpu), uuid
