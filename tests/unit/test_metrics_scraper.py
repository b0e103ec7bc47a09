"""Prometheus pages of model servers and of DCGM → numbers."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.documents import GpuMetrics, ModelMetrics
from inference_worker.metrics_scraper import ModelScraper, read_gpus, token_progress

CAPTURES = Path(__file__).resolve().parents[1] / "captures"
MIB = 1024 * 1024


def _read(text: str) -> ModelMetrics:
    metrics = ModelScraper().read(text)
    assert metrics is not None
    return metrics


# -- the model server -------------------------------------------------------------------------------------------------


def test_a_page_of_vllm_0_32_is_read() -> None:
    text = (CAPTURES / "vllm-0.32.0-metrics-under-load.txt").read_text(encoding="utf-8")
    assert ModelScraper().read(text) == ModelMetrics(
        kv_cache_usage=0.0,
        requests_running=0.0,
        requests_waiting=0.0,
        preemptions_total=0.0,
        prompt_tokens_total=32.0,
        generation_tokens_total=5422.0,
        prefix_cache_hit_rate=0.0,
    )
    assert token_progress(text) == 5454.0


def test_an_idle_page_after_one_under_load_moves_nothing() -> None:
    text = (CAPTURES / "vllm-0.32.0-metrics-idle.txt").read_text(encoding="utf-8")
    scraper = ModelScraper()
    first, second = scraper.read(text), scraper.read(text)
    assert first is not None
    assert second is not None
    assert second.prefix_cache_hit_rate is None
    assert second.prompt_tokens_total == first.prompt_tokens_total


def test_a_page_of_sglang_is_read() -> None:
    text = """\
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 8.128902e+06
sglang:generation_tokens_total{model_name="m"} 7.557572e+06
sglang:token_usage{model_name="m"} 0.28
sglang:cache_hit_rate{model_name="m"} 0.25
sglang:num_running_reqs{model_name="m"} 162.0
sglang:num_queue_reqs{model_name="m"} 2826.0
sglang:num_retracted_reqs{model_name="m"} 3.0
sglang:num_retracted_requests_total{model_name="m"} 41.0
"""
    assert ModelScraper().read(text) == ModelMetrics(
        kv_cache_usage=0.28,
        requests_running=162.0,
        requests_waiting=2826.0,
        preemptions_total=41.0,
        prompt_tokens_total=8128902.0,
        generation_tokens_total=7557572.0,
        prefix_cache_hit_rate=0.25,
    )


def test_a_page_of_tgi_is_read() -> None:
    text = """\
tgi_batch_current_size 8
tgi_queue_size 5
tgi_request_generated_tokens_bucket{le="1"} 2
tgi_request_generated_tokens_sum 6400
tgi_request_generated_tokens_count 25
tgi_request_input_length_sum 1280
"""
    assert ModelScraper().read(text) == ModelMetrics(
        requests_running=8.0, requests_waiting=5.0, prompt_tokens_total=1280.0, generation_tokens_total=6400.0
    )


@pytest.mark.parametrize("text", ["", "# EOF\n", "<html>busy</html>", '{"error":"x"}', "python_info 1\n"])
def test_a_page_without_known_series_is_none(text: str) -> None:
    assert ModelScraper().read(text) is None
    assert token_progress(text) is None


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ('vllm:kv_cache_usage_perc{engine="0"} 0.5\n', 0.5),
        ('vllm:gpu_cache_usage_perc{engine="0"} 0.4\n', 0.4),
        ("vllm:gpu_cache_usage_perc 0.4\nvllm:kv_cache_usage_perc 0.5\n", 0.5),
        ("vllm:kv_cache_usage_perc NaN\nvllm:gpu_cache_usage_perc 0.4\n", 0.4),
        ("vllm:num_requests_running 1\n", None),
    ],
    ids=["new", "old", "both: new wins", "the new one is no number", "neither: null, not 0"],
)
def test_r69_either_name_fills_kv_cache_usage(page: str, expected: float | None) -> None:
    assert _read(page).kv_cache_usage == expected


def test_r69_counts_of_several_engines_add_up_and_a_ratio_is_their_mean() -> None:
    metrics = _read(
        """\
vllm:kv_cache_usage_perc{engine="0"} 0.9
vllm:kv_cache_usage_perc{engine="1"} 0.7
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 4
vllm:prefix_cache_queries_total{engine="0"} 100
vllm:prefix_cache_queries_total{engine="1"} 300
vllm:prefix_cache_hits_total{engine="0"} 100
vllm:prefix_cache_hits_total{engine="1"} 0
"""
    )
    assert metrics.kv_cache_usage == pytest.approx(0.8)
    assert metrics.requests_running == 7.0
    assert metrics.prefix_cache_hit_rate == 0.25


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e999", "9" * 5000, "9" * 400, "x", ""])
def test_r69_one_unreadable_engine_makes_the_sum_unknown_and_nothing_else(value: str) -> None:
    metrics = _read(
        f"""\
vllm:num_requests_running{{engine="0"}} 3
vllm:num_requests_running{{engine="1"}} {value}
vllm:num_requests_waiting{{engine="0"}} 2
"""
    )
    assert metrics.requests_running is None
    assert metrics.requests_waiting == 2.0


@pytest.mark.parametrize("value", ["1.5", "100", "-0.1", "NaN"])
def test_a_ratio_outside_0_to_1_is_null(value: str) -> None:
    assert _read(f"vllm:kv_cache_usage_perc {value}\n").kv_cache_usage is None


def test_a_sum_that_overflows_is_null() -> None:
    page = 'vllm:prompt_tokens_total{engine="0"} 1.7e308\nvllm:prompt_tokens_total{engine="1"} 1.7e308\n'
    assert _read(page).prompt_tokens_total is None


@pytest.mark.parametrize(
    "bad_line",
    [
        'vllm:e2e_request_latency_seconds_bucket{le="0.5"} 3 # {trace_id="a"} 0.4 1.7e9',
        "vllm:kv_cache_usage_perc{",
        'vllm:kv_cache_usage_perc{engine="0"} ',
        'vllm:kv_cache_usage_perc{engine="un"escaped"} 1',
        'vllm:kv_cache_usage_perc{engine="0", ="x"} 1',
        f"vllm:kv_cache_usage_perc 1 {'9' * 400}",
        "<html><body>502 Bad Gateway</body></html>",
        "# TYPE",
        "# EOF",
    ],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_r68_lines_before_and_after_a_bad_line_count(bad_line: str, line_end: str) -> None:
    lines = ["vllm:num_requests_running 1", bad_line, "vllm:num_requests_waiting 2", ""]
    metrics = _read(line_end.join(lines))
    assert metrics.requests_running == 1.0
    assert metrics.requests_waiting == 2.0
    assert metrics.kv_cache_usage is None


def test_r68_an_openmetrics_page_with_exemplars_and_time_stamps_is_read() -> None:
    metrics = _read(
        """\
# HELP vllm:prompt_tokens Number of prefill tokens processed.
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0", model_name="a b,}"} 12.0 # {trace_id="a"} 4.0 1.7e9
vllm:prompt_tokens_created{engine="0", model_name="a b,}"} 1.7e+09
  vllm:num_requests_running\t{engine="0"} 3 1700000000000
# EOF
"""
    )
    assert metrics.prompt_tokens_total == 12.0
    assert metrics.requests_running == 3.0


def test_r68_created_series_and_other_caches_are_taken_for_no_count() -> None:
    page = """\
vllm:prompt_tokens_created 1.7e+09
vllm:num_preemptions_created 1.7e+09
vllm:prefix_cache_queries_created 1.7e+09
vllm:external_prefix_cache_queries_total 10
vllm:external_prefix_cache_hits_total 10
vllm:mm_cache_queries_total 10
vllm:mm_cache_hits_total 10
vllm:iteration_tokens_total_sum 99
vllm:prompt_tokens_by_source_total{source="x"} 99
vllm:request_generation_tokens_sum 99
vllm:num_requests_waiting_by_reason{reason="capacity"} 99
"""
    assert ModelScraper().read(page) is None
    assert token_progress(page) is None


# -- the prefix cache -------------------------------------------------------------------------------------------------


def _cache_page(queries: object, hits: object, *, prefix: str = "vllm:prefix_cache", suffix: str = "_total") -> str:
    return f"{prefix}_queries{suffix} {queries}\n{prefix}_hits{suffix} {hits}\n"


def _hit_rates(*pages: str) -> list[float | None]:
    scraper = ModelScraper()
    return [metrics and metrics.prefix_cache_hit_rate for metrics in map(scraper.read, pages)]


def test_the_hit_rate_is_that_of_the_time_since_the_scrape_before() -> None:
    assert _hit_rates(_cache_page(1000, 500), _cache_page(1100, 525)) == [0.5, 0.25]


def test_a_hit_rate_without_queries_is_null() -> None:
    assert _hit_rates(_cache_page(0, 0), _cache_page(10, 5), _cache_page(10, 5)) == [None, 0.5, None]


def test_r72_counters_of_a_restarted_model_begin_anew() -> None:
    assert _hit_rates(_cache_page(1000, 900), _cache_page(200, 50)) == [0.9, 0.25]


def test_r72_an_empty_scrape_is_no_reset() -> None:
    assert _hit_rates(_cache_page(1000, 900), "", _cache_page(1200, 950)) == [0.9, None, 0.25]


def test_r72_an_unreadable_counter_is_no_reset() -> None:
    pages = (_cache_page(1000, 900), _cache_page("NaN", 910), _cache_page(1200, 950))
    assert _hit_rates(*pages) == [0.9, None, 0.25]


def test_r72_one_counter_that_went_back_resets_both() -> None:
    # 60 of 200 since the restart, and not 10 of 200; 60 of 1200, and not -840 of 200
    assert _hit_rates(_cache_page(1000, 50), _cache_page(200, 60)) == [0.05, 0.3]
    assert _hit_rates(_cache_page(1000, 900), _cache_page(1200, 60)) == [0.9, 0.05]


@pytest.mark.parametrize(
    "page",
    [
        _cache_page(100, 25, prefix="vllm:gpu_prefix_cache"),
        _cache_page(100, 25, prefix="vllm:gpu_prefix_cache", suffix=""),
        "vllm:gpu_prefix_cache_hit_rate 0.25\n",
    ],
)
def test_r69_older_names_of_the_prefix_cache_are_read(page: str) -> None:
    assert _hit_rates(page) == [0.25]


def test_a_counter_that_is_declared_without_total_keeps_its_name() -> None:
    page = _cache_page(100, 25, prefix="vllm:gpu_prefix_cache", suffix="")
    typed = f"# TYPE vllm:gpu_prefix_cache_queries counter\n# TYPE vllm:gpu_prefix_cache_hits counter\n{page}"
    assert _hit_rates(typed) == [0.25]


def test_vllms_old_way_of_saying_no_rate_is_null() -> None:
    assert _hit_rates("vllm:gpu_prefix_cache_hit_rate -1.0\n") == [None]


def test_more_hits_than_queries_are_no_rate() -> None:
    assert _hit_rates(_cache_page(100, 200)) == [None]


def test_r72_token_progress_changes_when_the_counters_begin_anew() -> None:
    before = token_progress("vllm:prompt_tokens_total 10\nvllm:generation_tokens_total 90\n")
    after = token_progress("vllm:prompt_tokens_total 0\nvllm:generation_tokens_total 0\n")
    assert (before, after) == (100.0, 0.0)


# -- the GPUs ---------------------------------------------------------------------------------------------------------

DCGM_PAGE = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a", device="nvidia0",modelName="NVIDIA A100",Hostname="h"} 87
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b", device="nvidia1",modelName="NVIDIA A100",Hostname="h"} 0
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a"} 1024
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a"} 39000
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a"} 312.456
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a"} 63
DCGM_FI_DEV_MEMORY_TEMP{gpu="0",UUID="GPU-a"} 9223372036854775794
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",UUID="GPU-a"} 322512000000
"""


def test_a_dcgm_page_becomes_one_entry_a_gpu_in_bytes_ratios_and_watts() -> None:
    assert read_gpus(DCGM_PAGE) == [
        GpuMetrics(
            gpu="0",
            uuid="GPU-a",
            utilization=0.87,
            memory_used_bytes=1024 * MIB,
            memory_free_bytes=39000 * MIB,
            power_w=312.456,
            temperature_c=63.0,
        ),
        GpuMetrics(gpu="1", uuid="GPU-b", utilization=0.0),
    ]


@pytest.mark.parametrize(
    "value",
    [
        "9223372036854775794",
        "9.223372036854776e+18",
        "140737488355328",
        "4294967295",
        "2147483632",
        "2147483635",
        "NaN",
        "+Inf",
        "-1",
        "",
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_DEV_FB_FREE",
        "DCGM_FI_DEV_POWER_USAGE",
        "DCGM_FI_DEV_GPU_TEMP",
    ],
)
def test_r70_no_value_numbers_become_null_and_the_rest_of_the_page_counts(name: str, value: str) -> None:
    others = [line for line in DCGM_PAGE.splitlines() if not line.startswith(f"{name}{{")]
    page = "\n".join([others[0], f'{name}{{gpu="0",UUID="GPU-a"}} {value}', *others[1:], ""])
    whole, gpus = {gpu.gpu: gpu for gpu in read_gpus(DCGM_PAGE)}, {gpu.gpu: gpu for gpu in read_gpus(page)}
    field = {
        "DCGM_FI_DEV_GPU_UTIL": "utilization",
        "DCGM_FI_DEV_FB_USED": "memory_used_bytes",
        "DCGM_FI_DEV_FB_FREE": "memory_free_bytes",
        "DCGM_FI_DEV_POWER_USAGE": "power_w",
        "DCGM_FI_DEV_GPU_TEMP": "temperature_c",
    }[name]
    assert gpus["0"] == msgspec.structs.replace(whole["0"], **{field: None})


@pytest.mark.parametrize(("percent", "ratio"), [("0", 0.0), ("100", 1.0), ("100.1", None), ("101", None)])
def test_r70_no_utilization_is_above_1(percent: str, ratio: float | None) -> None:
    assert [gpu.utilization for gpu in read_gpus(f'DCGM_FI_DEV_GPU_UTIL{{gpu="0"}} {percent}\n')] == [ratio]


def test_the_uuid_label_is_read_in_either_case() -> None:
    page = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a"} 50\nDCGM_FI_DEV_GPU_TEMP{gpu="0",uuid="GPU-a"} 60\n'
    assert read_gpus(page) == [GpuMetrics(gpu="0", uuid="GPU-a", utilization=0.5, temperature_c=60.0)]


def test_pods_that_share_a_gpu_make_one_entry() -> None:
    page = """\
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",pod="x"} 100
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",pod="y"} 100
"""
    assert read_gpus(page) == [GpuMetrics(gpu="0", uuid="GPU-a", memory_used_bytes=100 * MIB)]


def test_a_mig_instance_is_an_entry_of_its_own() -> None:
    page = """\
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a"} 80
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",GPU_I_PROFILE="3g.20gb",GPU_I_ID="2"} 50
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",GPU_I_PROFILE="1g.5gb",GPU_I_ID="7"} 100
"""
    assert {gpu.gpu: (gpu.power_w, gpu.memory_used_bytes) for gpu in read_gpus(page)} == {
        "0": (80.0, None),
        "0/2": (None, 50 * MIB),
        "0/7": (None, 100 * MIB),
    }


@pytest.mark.parametrize("text", ["", "<html></html>", "DCGM_FI_DEV_GPU_UTIL 5\n", 'DCGM_FI_DEV_GPU_UTIL{gpu="0" 5\n'])
def test_a_page_that_names_no_gpu_has_none(text: str) -> None:
    assert read_gpus(text) == []


# -- any text ---------------------------------------------------------------------------------------------------------

_NAMES = st.sampled_from(
    [
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:prompt_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "sglang:cache_hit_rate",
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_DEV_POWER_USAGE",
    ]
)
_LABELS = st.one_of(
    st.just(""), st.just('{gpu="0",UUID="GPU-a"}'), st.text('{}gpu="0,\\# ', max_size=12).map("{{{0}}}".format)
)
_VALUES = st.one_of(
    st.floats().map(repr), st.integers().map(str), st.text(max_size=8), st.just("9" * 400), st.just("1e308")
)
_LINES = st.one_of(st.builds("{0}{1} {2}".format, _NAMES, _LABELS, _VALUES), st.text(max_size=20))
_PAGES = st.lists(_LINES, max_size=12).map("\n".join)


def _numbers(struct: msgspec.Struct) -> list[float]:
    return [value for value in msgspec.structs.astuple(struct) if isinstance(value, (int, float))]


@given(pages=st.lists(st.one_of(_PAGES, st.text()), min_size=1, max_size=3))
def test_r70_whatever_the_text_nothing_is_raised_and_no_number_is_absurd(pages: list[str]) -> None:
    scraper = ModelScraper()
    for page in pages:
        metrics = scraper.read(page) or ModelMetrics()
        progress = token_progress(page)
        gpus = read_gpus(page)
        numbers = [number for struct in (metrics, *gpus) for number in _numbers(struct)]
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert progress is None or (math.isfinite(progress) and progress >= 0)
        ratios = [metrics.kv_cache_usage, metrics.prefix_cache_hit_rate, *(gpu.utilization for gpu in gpus)]
        assert all(ratio is None or ratio <= 1 for ratio in ratios)
