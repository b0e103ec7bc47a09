"""The environment as one table: names, defaults, rules, and that no fault hides another."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.config import (
    VARIABLES,
    Config,
    Variable,
    clean,
    effective_values,
    load_config,
    load_environment,
    to_markdown,
    to_text,
)
from inference_worker.errors import ConfigError, Fault

README = Path(__file__).parents[2] / "README.md"

REQUIRED = (
    "METRIC_SERVER_URL",
    "METRIC_SERVER_SERVICE_TOKEN",
    "CROESUS_HOST",
    "DEPLOYMENT_ID",
    "REPLICA_ID",
    "USER_ID",
    "HF_MODEL_ID",
)

#: the specification's table: name, default as it would be written; None is "required"
SPECIFICATION: dict[str, str | None] = {
    "RABBITMQ_HOST": "localhost",
    "RABBITMQ_PORT": "5672",
    "RABBITMQ_USERNAME": "guest",
    "RABBITMQ_PASSWORD": "guest",
    "RABBITMQ_VHOST": "/",
    "RABBITMQ_HEARTBEAT_S": "120",
    "RABBITMQ_PREFETCH": "1",
    "RABBITMQ_MAX_RETRIES": "1",
    "INFERENCE_DLX": "infer.dlx",
    "INFERENCE_DLQ": "infer.dlq",
    "INFERENCE_DLX_ROUTING_KEY": "dead",
    "MODEL_CONTAINER_URL": "http://localhost:8000",
    "MODEL_INFER_PATH": "/v1/chat/completions",
    "MODEL_INFER_TIMEOUT_S": "300",
    "HEALTH_CHECK_INTERVAL_S": "10",
    "REDIS_URL": "redis://localhost:6379",
    "REDIS_PASSWORD": "",
    "REDIS_RESPONSE_TTL_S": "3600",
    "REDIS_RETRY_DELAY_S": "10",
    "METRIC_SERVER_URL": None,
    "METRIC_SERVER_SERVICE_TOKEN": None,
    "METRICS_FLUSH_INTERVAL_S": "30",
    "VLLM_METRICS_URL": "",
    "DCGM_METRICS_URL": "",
    "CROESUS_HOST": None,
    "DEPLOYMENT_ID": None,
    "REPLICA_ID": None,
    "USER_ID": None,
    "ORG_ID": "",
    "HF_MODEL_ID": None,
}

#: what `Config` holds when only the required variables are set
DEFAULTS: dict[str, object] = {
    "broker.hosts": ("localhost",),
    "broker.port": 5672,
    "broker.username": "guest",
    "broker.password": "guest",
    "broker.vhost": "/",
    "broker.heartbeat_s": 120,
    "broker.prefetch": 1,
    "broker.lookahead": 0,
    "broker.tls": False,
    "broker.ca_file": "",
    "broker.cert_file": "",
    "broker.key_file": "",
    "broker.queue_type": "",
    "broker.dlx": "infer.dlx",
    "broker.dlq": "infer.dlq",
    "broker.dlx_routing_key": "dead",
    "retry.max_retries": 1,
    "retry.max_redeliveries": 10,
    "model.base_url": "http://localhost:8000",
    "model.infer_path": "/v1/chat/completions",
    "model.infer_timeout_s": 300.0,
    "model.respects_deadline": False,
    "model.cancel_poll_interval_s": 1.0,
    "health.failure_threshold": 1,
    "health.success_threshold": 1,
    "health.stall_timeout_s": 0.0,
    "model.max_response_bytes": 64 * 1024 * 1024,
    "model.api_key": "",
    "model.retry_status_codes": frozenset(),
    "model.ttft_header": "x-ttft-ms",
    "model.tbt_header": "x-time-per-token",
    "health.interval_s": 10.0,
    "health.path": "/health",
    "health.timeout_s": 5.0,
    "store.url": "redis://localhost:6379",
    "store.password": "",
    "store.ttl_s": 3600,
    "store.retry_delay_s": 10.0,
    "store.timeout_s": 5.0,
    "metrics.flush_interval_s": 30.0,
    "metrics.buffer_size": 10_000,
    "metrics.http_timeout_s": 5.0,
    "metrics.vllm_url": "http://localhost:8000/metrics",
    "metrics.dcgm_url": "",
    "billing.batch_size": 1,
    "billing.outbox_path": "",
    "billing.service_token": "",
    "identity.org_id": "",
    "process.grace_s": 25.0,
    "process.http_host": "127.0.0.1",
    "process.http_port": 9464,
    "process.log_level": "INFO",
    "process.log_format": "text",
}

_NO_INTEGERS = ("abc", "1.5", "8.0", "8 # x", "0x10", "1e3", "1_000", "٣", "9" * 400, "1 2", "--1", "NaN")
_NO_SECONDS = ("abc", "-1", "10s", "1,5", "NaN", "inf", "1e400", "1.2.3", "10 # x", ".", "1_0")
_NO_HTTP_URLS = (
    "localhost:8000",
    "ftp://h",
    "http://",
    "//h",
    "http://h:0",
    "http://h:99999",
    "http://h:x",
    "http://a b/",
)
_NO_BASE_URLS = (*_NO_HTTP_URLS, "http://h/?a=b", "http://h#a")
_NO_IDENTIFIERS = ("a b", "a/b", "a\nb", "ä", "x" * 201, "a?b", "{a}")
_NO_HEADER_NAMES = ("a b", "a:b", "ä", "a\nb", "a/b")

#: values that each variable refuses, beside the empty one of a required variable
BAD_VALUES: dict[str, tuple[str, ...]] = {
    "RABBITMQ_HOST": ("a b", "amqp://h", "h/x", "user@h", "[::1", "a]b", "[]", "a,,b", "a,", "a b,c"),
    "RABBITMQ_LOOKAHEAD": (*_NO_INTEGERS, "-1", "1025"),
    "RABBITMQ_MAX_REDELIVERIES": (*_NO_INTEGERS, "-1", "1001"),
    "MODEL_INFER_RESPECT_DEADLINE": ("maybe", "2"),
    "CANCEL_POLL_INTERVAL_S": (*_NO_SECONDS, "-0.1", "0.04", "3601"),
    "HEALTH_FAILURE_THRESHOLD": (*_NO_INTEGERS, "0", "101"),
    "HEALTH_SUCCESS_THRESHOLD": (*_NO_INTEGERS, "0", "101"),
    "HEALTH_STALL_TIMEOUT_S": (*_NO_SECONDS, "-1", "86401"),
    "USAGE_OUTBOX_PATH": ("/no/such/folder/usage.db", "/tmp"),
    "RABBITMQ_TLS": ("maybe", "2", "tru"),
    "RABBITMQ_CA_FILE": ("/no/such/file", "/"),
    "RABBITMQ_CERT_FILE": ("/no/such/file",),
    "RABBITMQ_KEY_FILE": ("/no/such/file",),
    "RABBITMQ_PORT": (*_NO_INTEGERS, "0", "-1", "65536"),
    "RABBITMQ_HEARTBEAT_S": (*_NO_INTEGERS, "0", "-1", "3601", "0.5"),
    "RABBITMQ_PREFETCH": (*_NO_INTEGERS, "0", "-1", "1025"),
    "RABBITMQ_MAX_RETRIES": (*_NO_INTEGERS, "-1", "1001"),
    "RABBITMQ_QUEUE_TYPE": ("stream", "quorum,classic", "q"),
    "INFERENCE_DLX": ("x" * 256, "ä" * 128),
    "INFERENCE_DLQ": ("x" * 256,),
    "INFERENCE_DLX_ROUTING_KEY": ("x" * 256,),
    "MODEL_CONTAINER_URL": _NO_BASE_URLS,
    "MODEL_INFER_PATH": ("/a b", "/a#b"),
    "MODEL_INFER_TIMEOUT_S": (*_NO_SECONDS, "0", "0.05", "86401"),
    "MODEL_MAX_RESPONSE_BYTES": (*_NO_INTEGERS, "0", "1023", "536870913", "64MiB"),
    "MODEL_API_KEY": ("a b", "ä", "a\nb", "a\x7f"),
    "MODEL_RETRY_STATUS_CODES": (
        "abc",
        "200",
        "399",
        "600",
        "429;503",
        "429,",
        ",429",
        "4_29",
        "429,,503",
        "4xx",
        "-429",
    ),
    "MODEL_TTFT_HEADER": _NO_HEADER_NAMES,
    "MODEL_TBT_HEADER": _NO_HEADER_NAMES,
    "HEALTH_CHECK_INTERVAL_S": (*_NO_SECONDS, "0", "3601"),
    "HEALTH_CHECK_PATH": ("/a b", "/a#b"),
    "HEALTH_CHECK_TIMEOUT_S": (*_NO_SECONDS, "0", "601"),
    "REDIS_URL": ("localhost:6379", "http://h", "redis://", "unix:///x", "redis://:p@/0", "redis://h:x"),
    "REDIS_RESPONSE_TTL_S": (*_NO_INTEGERS, "0", "-1", "3600.0", "999999999"),
    "REDIS_RETRY_DELAY_S": (*_NO_SECONDS, "0", "3601"),
    "REDIS_TIMEOUT_S": (*_NO_SECONDS, "0", "601"),
    "METRIC_SERVER_URL": _NO_BASE_URLS,
    "METRIC_SERVER_SERVICE_TOKEN": ("a b", "ä", "a\nb"),
    "METRICS_FLUSH_INTERVAL_S": (*_NO_SECONDS, "0", "86401"),
    "METRICS_BUFFER_SIZE": (*_NO_INTEGERS, "0", "10000001"),
    "METRICS_HTTP_TIMEOUT_S": (*_NO_SECONDS, "0", "601"),
    "VLLM_METRICS_URL": _NO_HTTP_URLS,
    "DCGM_METRICS_URL": _NO_HTTP_URLS,
    "CROESUS_HOST": _NO_BASE_URLS,
    "CROESUS_SERVICE_TOKEN": ("a b", "ä", "a\nb"),
    "CROESUS_BATCH_SIZE": (*_NO_INTEGERS, "0", "1001"),
    "DEPLOYMENT_ID": _NO_IDENTIFIERS,
    "REPLICA_ID": _NO_IDENTIFIERS,
    "SHUTDOWN_GRACE_S": (*_NO_SECONDS, "3601"),
    "WORKER_HTTP_HOST": ("a b", "http://h", "[::1"),
    "WORKER_HTTP_PORT": (*_NO_INTEGERS, "-1", "65536"),
    "LOG_LEVEL": ("TRACE", "10", "INFOS"),
    "LOG_FORMAT": ("xml", "JSON,text"),
}

#: texts that are taken as they are: any will do, but for bytes that are no UTF-8
ANY_TEXT = {
    "RABBITMQ_USERNAME",
    "RABBITMQ_PASSWORD",
    "RABBITMQ_VHOST",
    "REDIS_PASSWORD",
    "USER_ID",
    "ORG_ID",
    "HF_MODEL_ID",
}

Environment = dict[str, str]


def _faults(environment: Environment) -> tuple[Fault, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(environment)
    return caught.value.faults


def _value(config: Config, target: str) -> object:
    section, _, name = target.partition(".")
    return getattr(getattr(config, section), name)


def _by_name(name: str) -> Variable:
    return next(variable for variable in VARIABLES if variable.name == name)


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_specifications_variables_are_there_with_its_defaults() -> None:
    ours = {variable.name: variable.default for variable in VARIABLES}
    assert {name: ours.get(name, "(missing)") for name in SPECIFICATION} == SPECIFICATION


def test_what_is_required_is_what_the_specification_requires() -> None:
    assert tuple(variable.name for variable in VARIABLES if variable.default is None) == REQUIRED


def test_every_field_of_the_config_has_exactly_one_variable() -> None:
    targets = [
        f"{section.name}.{field.name}"
        for section in fields(Config)
        for field in fields(type(_value_of_section(section.name)))
    ]
    assert sorted(targets) == sorted(variable.target for variable in VARIABLES)
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)


def _value_of_section(name: str) -> object:
    section = getattr(load_config(dict.fromkeys(REQUIRED, "http://x.invalid") | _IDENTITY), name)
    assert is_dataclass(section)
    return section


_IDENTITY = {"DEPLOYMENT_ID": "d", "REPLICA_ID": "r"}


def test_defaults_hold_when_only_what_is_required_is_set(environment: Environment) -> None:
    config = load_config(environment)
    assert {target: _value(config, target) for target in DEFAULTS} == DEFAULTS
    targets_of_required = {_by_name(name).target for name in REQUIRED}
    assert set(DEFAULTS) | targets_of_required == {variable.target for variable in VARIABLES}


def test_required_values_go_where_they_belong(environment: Environment) -> None:
    config = load_config(environment)
    assert config.metrics.server_url == "http://metrics.invalid:9000"
    assert config.metrics.service_token == "metrics-token"
    assert config.billing.croesus_url == "http://croesus.invalid:9001"
    assert config.identity.replica_id == "replica-1"
    assert config.identity.user_id == "user-1"
    assert config.identity.model_id == "org/model"
    assert config.identity.queue == "infer_req.3f0c5b1e-7c1d-4b0e-9a53-0a9f3f5a1c11"


def test_every_variable_has_bad_values_in_this_test_or_takes_any_text() -> None:
    assert set(BAD_VALUES) | ANY_TEXT == {variable.name for variable in VARIABLES}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values])
def test_bad_value_is_refused_by_name_with_its_rule(environment: Environment, name: str, value: str) -> None:
    variable = _by_name(name)
    (fault,) = _faults({**environment, name: value})
    assert (fault.variable, fault.rule) == (name, variable.kind.rule)
    assert fault.value == (None if variable.secret else value)
    assert name in str(fault)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_bytes_that_are_no_utf8_are_refused(environment: Environment, variable: Variable) -> None:
    assert [fault.variable for fault in _faults({**environment, variable.name: "a\udcff"})] == [variable.name]


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", ["", "  ", "''", None])
def test_missing_and_empty_required_variables_are_named(environment: Environment, name: str, value: str | None) -> None:
    environment.pop(name)
    if value is not None:
        environment[name] = value
    (fault,) = _faults(environment)
    assert (fault.variable, fault.value) == (name, None)
    assert fault.rule.startswith("is required")


def test_r77_all_faults_are_reported_at_once() -> None:
    bad = {name: values[0] for name, values in BAD_VALUES.items() if name not in REQUIRED}
    assert {fault.variable for fault in _faults(bad)} == {*bad, *REQUIRED}


@pytest.mark.parametrize("variable", [v for v in VARIABLES if v.secret], ids=lambda variable: variable.name)
def test_r80_no_secrets_value_is_shown_in_a_fault(environment: Environment, variable: Variable) -> None:
    faults = _faults({**environment, variable.name: "S3cret value\udcff"})
    assert "S3cret" not in str(ConfigError(faults))
    assert "S3cret" not in repr(faults)


def test_r80_every_password_token_and_key_is_a_secret() -> None:
    named = {v.name for v in VARIABLES if re.search("PASSWORD|TOKEN|API_KEY", v.name)}
    assert {v.name for v in VARIABLES if v.secret} == {*named, "REDIS_URL"}


@pytest.fixture
def secret_environment(environment: Environment) -> Environment:
    return {
        **environment,
        "RABBITMQ_PASSWORD": "S3cretA",
        "REDIS_URL": "redis://:S3cretB@bad-host.invalid/",
        "REDIS_PASSWORD": "S3cretE",
        "METRIC_SERVER_SERVICE_TOKEN": "S3cretC",
        "MODEL_API_KEY": "S3cretD",
        "CROESUS_SERVICE_TOKEN": "S3cretF",
    }


def test_r80_no_secret_is_in_what_is_printed_of_the_config(secret_environment: Environment) -> None:
    config = load_config(secret_environment)
    assert "S3cret" not in repr(config)
    assert "S3cret" not in repr(effective_values(config))


def test_secrets_are_told_to_be_set_or_not(secret_environment: Environment, environment: Environment) -> None:
    shown = {variable.name: value for variable, value in effective_values(load_config(secret_environment))}
    assert {shown[v.name] for v in VARIABLES if v.secret} == {"(set)"}
    shown = {variable.name: value for variable, value in effective_values(load_config(environment))}
    assert shown["MODEL_API_KEY"] == "(not set)"


def test_effective_values_are_written_as_in_the_environment(environment: Environment) -> None:
    environment |= {"MODEL_RETRY_STATUS_CODES": "503, 429", "HEALTH_CHECK_INTERVAL_S": "2.50"}
    shown = {variable.name: value for variable, value in effective_values(load_config(environment))}
    assert list(shown) == [variable.name for variable in VARIABLES]
    assert (shown["MODEL_RETRY_STATUS_CODES"], shown["HEALTH_CHECK_INTERVAL_S"]) == ("429,503", "2.5")


# -- good values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given_", "expected"),
    [
        ("RABBITMQ_PORT", "+5673", 5673),
        ("RABBITMQ_HEARTBEAT_S", "1", 1),
        ("RABBITMQ_PREFETCH", "1024", 1024),
        ("RABBITMQ_MAX_RETRIES", "0", 0),
        ("RABBITMQ_QUEUE_TYPE", "Quorum", "quorum"),
        ("MODEL_INFER_TIMEOUT_S", "0.5", 0.5),
        ("MODEL_INFER_TIMEOUT_S", "3e2", 300.0),
        ("MODEL_RETRY_STATUS_CODES", "429,503", frozenset({429, 503})),
        ("MODEL_RETRY_STATUS_CODES", " 429 , 503 ", frozenset({429, 503})),
        ("MODEL_TTFT_HEADER", "X-TTFT", "x-ttft"),
        ("SHUTDOWN_GRACE_S", "0", 0.0),
        ("WORKER_HTTP_PORT", "0", 0),
        ("LOG_LEVEL", "debug", "DEBUG"),
        ("LOG_FORMAT", "JSON", "json"),
        ("REDIS_URL", "REDIS://h:1/2", "redis://h:1/2"),
        ("REDIS_URL", "rediss://user:p%40ss@h", "rediss://user:p%40ss@h"),
        ("DCGM_METRICS_URL", "http://h:9400/metrics?x=1", "http://h:9400/metrics?x=1"),
        ("VLLM_METRICS_URL", "http://h:1/m", "http://h:1/m"),
        ("HF_MODEL_ID", "org/модель", "org/модель"),
    ],
)
def test_good_values(environment: Environment, name: str, given_: str, expected: object) -> None:
    assert _value(load_config({**environment, name: given_}), _by_name(name).target) == expected


def test_r02_heartbeat_cannot_be_switched_off(environment: Environment) -> None:
    assert [f.variable for f in _faults({**environment, "RABBITMQ_HEARTBEAT_S": "0"})] == ["RABBITMQ_HEARTBEAT_S"]


@pytest.mark.parametrize(("given_", "expected"), [("3600 ", 3600), ("", 3600), ("  ", 3600), ('"60"', 60), ("1", 1)])
def test_r37_ttl_is_a_whole_number_of_seconds_from_one_up(environment: Environment, given_: str, expected: int) -> None:
    ttl_s = load_config({**environment, "REDIS_RESPONSE_TTL_S": given_}).store.ttl_s
    assert (ttl_s, type(ttl_s)) == (expected, int)


@pytest.mark.parametrize(
    "given_",
    [
        "http://localhost:8000\r",
        "'http://localhost:8000'",
        '"http://localhost:8000"',
        " http://localhost:8000 ",
        '\t"http://localhost:8000 "\r\n',
        "\u00a0http://localhost:8000",
        "HTTP://localhost:8000",
    ],
)
def test_r76_invisible_characters_and_one_pair_of_quotes_are_taken_off(environment: Environment, given_: str) -> None:
    assert load_config({**environment, "MODEL_CONTAINER_URL": given_}).model.base_url == "http://localhost:8000"


def test_r76_a_number_in_white_space_is_that_number(environment: Environment) -> None:
    assert load_config({**environment, "RABBITMQ_PREFETCH": " 8 "}).broker.prefetch == 8


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [("'", "'"), ("''", ""), ("\"a'", "\"a'"), ("''a''", "'a'"), ("'a", "'a"), ("a'", "a'"), ("' a '", "a"), ("", "")],
)
def test_r76_only_one_whole_pair_of_quotes_is_taken_off(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    "variable", [v for v in VARIABLES if v.default is not None], ids=lambda variable: variable.name
)
def test_r77_empty_is_unset(environment: Environment, variable: Variable) -> None:
    assert load_config({**environment, variable.name: ""}) == load_config(environment)
    assert load_config({**environment, variable.name: " \r\n"}) == load_config(environment)
    assert load_config({**environment, variable.name: '""'}) == load_config(environment)


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/", "//", "/v1//"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_r78_urls_have_one_slash_and_one_v1(environment: Environment, tail: str, slash: str) -> None:
    environment |= {
        "MODEL_CONTAINER_URL": f"http://h:8000{tail}",
        "MODEL_INFER_PATH": f"{slash}v1/chat/completions",
        "HEALTH_CHECK_PATH": f"{slash}health",
        "METRIC_SERVER_URL": f"http://m:1{slash}",
        "CROESUS_HOST": f"http://c:1{slash}",
    }
    config = load_config(environment)
    assert config.model.base_url + config.model.infer_path == "http://h:8000/v1/chat/completions"
    assert config.model.base_url + config.health.path == "http://h:8000/health"
    assert config.metrics.vllm_url == "http://h:8000/metrics"
    assert config.metrics.server_url + "/metrics" == "http://m:1/metrics"
    assert config.billing.croesus_url + "/events" == "http://c:1/events"


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("http://v1", "http://v1"),
        ("http://v1/v1", "http://v1"),
        ("http://h/openai/v1", "http://h/openai"),
        ("http://h/myv1", "http://h/myv1"),
        ("https://h", "https://h"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_r78_only_a_last_segment_v1_is_taken_off(environment: Environment, given_: str, expected: str) -> None:
    assert load_config({**environment, "MODEL_CONTAINER_URL": given_}).model.base_url == expected


@pytest.mark.parametrize("vhost", ["/", "name", "/name", "a/b", "%2F", "//", "a b"])
def test_r79_vhost_is_taken_literally(environment: Environment, vhost: str) -> None:
    assert load_config({**environment, "RABBITMQ_VHOST": vhost}).broker.vhost == vhost


@pytest.mark.parametrize("text", ["p@ss", "p%40ss", "a:b", "a/b", "p@ss:/#?%2F+&=[]", "${HOME}", "$HOME", "a#b", "\\n"])
def test_r79_users_and_passwords_are_taken_literally(environment: Environment, text: str) -> None:
    names = ("RABBITMQ_USERNAME", "RABBITMQ_PASSWORD", "REDIS_PASSWORD")
    config = load_config({**environment, **dict.fromkeys(names, text)})
    assert [config.broker.username, config.broker.password, config.store.password] == [text] * 3


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_r81_brackets_around_an_ipv6_host_mean_nothing(environment: Environment, host: str) -> None:
    environment |= {"RABBITMQ_HOST": host, "WORKER_HTTP_HOST": host}
    config = load_config(environment)
    assert (config.broker.hosts, config.process.http_host) == (("::1",), "::1")


def test_names_of_nobody_are_ignored(environment: Environment) -> None:
    assert load_config({**environment, "PATH": "/bin", "RABBITMQ_PORTS": "x"}) == load_config(environment)


@given(st.sampled_from(VARIABLES), st.lists(st.sampled_from("\udcff\"' ") | st.characters(codec=None)).map("".join))
def test_any_text_is_a_value_or_a_fault_of_that_variable(variable: Variable, text: str) -> None:
    environment = dict.fromkeys(REQUIRED, "http://x.invalid") | _IDENTITY
    try:
        config = load_config({**environment, variable.name: text})
    except ConfigError as err:
        assert [fault.variable for fault in err.faults] == [variable.name]  # noqa: PT017
    else:
        assert str(_value(config, variable.target)).encode() is not None


# -- the process's environment and the file ---------------------------------------------------------------------------


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_environment_wins_over_the_file(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (in_folder / ".env").write_text("USER_ID=file\nORG_ID=file\n")
    monkeypatch.setenv("USER_ID", "real")
    found = load_environment()
    assert (found["USER_ID"], found["ORG_ID"]) == ("real", "file")


def test_no_file_is_no_fault(in_folder: Path) -> None:
    assert "USER_ID" not in load_environment()


def test_file_above_the_working_directory_is_not_read(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (in_folder / ".env").write_text("USER_ID=above\n")
    (in_folder / "below").mkdir()
    monkeypatch.chdir(in_folder / "below")
    assert "USER_ID" not in load_environment()


def test_r79_password_in_the_file_is_taken_literally(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X", "expanded")
    (in_folder / ".env").write_text("RABBITMQ_PASSWORD='p${X}$X%40'\nexport REDIS_PASSWORD=a${X}\nBARE\n")
    found = load_environment()
    assert (found["RABBITMQ_PASSWORD"], found["REDIS_PASSWORD"]) == ("p${X}$X%40", "a${X}")
    assert "BARE" not in found


def test_file_that_cannot_be_read_is_a_fault(in_folder: Path) -> None:
    (in_folder / ".env").write_bytes(b"USER_ID=\xff\n")
    with pytest.raises(ConfigError) as caught:
        load_environment()
    assert [fault.variable for fault in caught.value.faults] == [".env"]


# -- what people read -------------------------------------------------------------------------------------------------


def test_table_of_the_readme_is_the_table_of_the_code() -> None:
    text = README.read_text()
    found = re.search(r"<!-- variables -->\n(.*?)<!-- /variables -->", text, re.DOTALL)
    assert found is not None, "the README has no <!-- variables --> ... <!-- /variables -->"
    assert found[1].strip() == to_markdown().strip()


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_every_variable_is_in_the_table_and_the_help_with_its_rule(variable: Variable) -> None:
    (row,) = [line for line in to_markdown().splitlines() if line.startswith(f"| `{variable.name}` |")]
    assert row.count("|") == 4
    assert ("required" if variable.default is None else variable.default) in row
    assert f"  {variable.name} " in to_text()
    if variable.name not in ANY_TEXT:
        assert variable.kind.rule in row
        assert variable.kind.rule in to_text()


@pytest.mark.parametrize("name", ["MODEL_CONTAINER_URL", "METRIC_SERVER_URL", "CROESUS_HOST", "VLLM_METRICS_URL"])
def test_a_login_inside_an_http_url_is_refused_since_it_would_replace_the_bearer_token(
    environment: Environment, name: str
) -> None:
    environment[name] = "http://user:secret@host:8000"
    with pytest.raises(ConfigError) as caught:
        load_config(environment)
    assert [fault.variable for fault in caught.value.faults] == [name]


@pytest.mark.parametrize("url", ["redis://h:1/0?socket_timeout=abc", "redis://:p#w@h", "redis://:p?w@h:1"])
def test_r35_options_and_unescaped_signs_in_the_redis_url_are_refused(environment: Environment, url: str) -> None:
    environment["REDIS_URL"] = url
    with pytest.raises(ConfigError) as caught:
        load_config(environment)
    (fault,) = caught.value.faults
    assert (fault.variable, fault.value) == ("REDIS_URL", None)


# -- secrets from files, several hosts, flags -------------------------------------------------------------------------

SECRETS = [variable.name for variable in VARIABLES if variable.secret]


@pytest.mark.parametrize("name", SECRETS)
def test_every_secret_may_come_from_a_file(environment: Environment, tmp_path: Path, name: str) -> None:
    value = "redis://:pw@h" if name == "REDIS_URL" else "from-a-file"
    (tmp_path / "secret").write_text(value + "\n")
    environment.pop(name, None)
    environment[f"{name}_FILE"] = str(tmp_path / "secret")
    (variable,) = [variable for variable in VARIABLES if variable.name == name]
    section, _, field = variable.target.partition(".")
    assert getattr(getattr(load_config(environment), section), field) == value


def test_a_value_in_the_environment_wins_over_its_file(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from-a-file")
    environment |= {"MODEL_API_KEY": "direct", "MODEL_API_KEY_FILE": str(tmp_path / "secret")}
    assert load_config(environment).model.api_key == "direct"


def test_a_secret_file_that_cannot_be_read_is_a_fault_that_names_it(environment: Environment) -> None:
    environment["MODEL_API_KEY_FILE"] = "/no/such/secret"
    with pytest.raises(ConfigError) as caught:
        load_config(environment)
    (fault,) = caught.value.faults
    assert (fault.variable, fault.value) == ("MODEL_API_KEY_FILE", "/no/such/secret")


def test_what_is_no_secret_does_not_come_from_a_file(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "port").write_text("1234")
    environment["RABBITMQ_PORT_FILE"] = str(tmp_path / "port")
    assert load_config(environment).broker.port == 5672


def test_r14_several_hosts_are_separated_by_commas(environment: Environment) -> None:
    environment["RABBITMQ_HOST"] = "rabbit-1, [::1] ,10.0.0.1"
    assert load_config(environment).broker.hosts == ("rabbit-1", "::1", "10.0.0.1")


@pytest.mark.parametrize(
    ("text", "expected"), [("true", True), ("TRUE", True), ("1", True), ("no", False), ("", False)]
)
def test_a_flag_is_said_in_many_ways(environment: Environment, text: str, expected: bool) -> None:
    environment["RABBITMQ_TLS"] = text
    assert load_config(environment).broker.tls is expected
