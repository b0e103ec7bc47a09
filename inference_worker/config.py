"""The environment, checked and turned into one frozen `Config`; all faults are reported at once.

Main thread, once, before anything else starts. The only file that knows `os.environ` and dotenv. `VARIABLES` is the
source of the names, types, ranges, defaults and help texts: `--help` and the README's table are made from it.
Sources: specification ("Configuration"), design section 11, field reports kind (k).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import dotenv

from inference_worker.errors import ConfigError, Fault

# -- what a value has to be ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """How the text of a variable is read, and the rule that is shown when it cannot be."""

    #: raises ValueError for what the rule forbids
    read: Callable[[str], Any]
    rule: str


def _text() -> Kind:
    return Kind(str, "must be a text")


def _integer(low: int, high: int) -> Kind:
    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise ValueError
        return int(text)

    return Kind(read, f"must be an integer from {low} to {high}")


def _seconds(low: float, high: float, *, zero: bool = False) -> Kind:
    def read(text: str) -> float:
        value = float(text) if re.fullmatch(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", text, re.IGNORECASE) else math.nan
        if not (low <= value <= high or (zero and value == 0)):
            raise ValueError
        return value

    return Kind(read, f"must be {'0 or ' if zero else ''}a number of seconds from {low:g} to {high:g}")


def _choice(*words: str) -> Kind:
    def read(text: str) -> str:
        for word in words:
            if text.lower() == word.lower():
                return word
        raise ValueError

    return Kind(read, "must be one of " + ", ".join(words))


def _status_codes() -> Kind:
    def read(text: str) -> frozenset[int]:
        if not re.fullmatch(r"[45][0-9]{2}(\s*,\s*[45][0-9]{2})*", text):
            raise ValueError
        return frozenset(int(part) for part in text.split(","))

    return Kind(read, "must be HTTP status codes from 400 to 599, separated by commas")


def _url(*schemes: str) -> Kind:
    def read(text: str) -> str:
        parts = urlsplit(text)
        if parts.scheme not in schemes or not parts.hostname or re.search(r"\s", text):
            raise ValueError
        if parts.port is not None and not 0 < parts.port < 65536:
            raise ValueError
        # redis-py knows its schemes in lower case only
        return parts.scheme + text[len(parts.scheme) :].rstrip("/")

    return Kind(read, "must be a URL that starts with " + " or ".join(f"{scheme}://" for scheme in schemes))


def _http_url() -> Kind:
    http = _url("http", "https")

    def read(text: str) -> str:
        # requests would make a Basic login of them, which takes the place of our Bearer token, and `--check` shows URLs
        if "@" in urlsplit(text).netloc:
            raise ValueError
        return str(http.read(text))

    return Kind(read, http.rule + ", without a user name or a password")


def _redis_url() -> Kind:
    url = _url("redis", "rediss")

    def read(text: str) -> str:
        # options in the URL win over our timeouts; and an unescaped ? or # in a password moves the host (R35)
        if "?" in text or "#" in text:
            raise ValueError
        return str(url.read(text))

    return Kind(read, url.rule + ", without options; reserved characters of a password are percent-encoded")


def _base_url() -> Kind:
    http = _http_url()

    def read(text: str) -> str:
        # a path is appended to it
        if "?" in text or "#" in text:
            raise ValueError
        return str(http.read(text))

    return Kind(read, http.rule + ", and has no query")


def _model_base_url() -> Kind:
    base = _base_url()

    def read(text: str) -> str:
        url = str(base.read(text))
        # people paste the base URL of an OpenAI client, which ends in /v1; the paths bring theirs (field report R78)
        return url.removesuffix("/v1").rstrip("/") if urlsplit(url).path.endswith("/v1") else url

    return Kind(read, base.rule)


def _path() -> Kind:
    def read(text: str) -> str:
        if re.search(r"[\s#]", text):
            raise ValueError
        return "/" + text.lstrip("/")

    return Kind(read, "must be a URL path")


def _host() -> Kind:
    def read(text: str) -> str:
        # pika takes `[::1]` for an unknown host name
        host = text[1:-1] if text[:1] == "[" and text[-1:] == "]" else text
        if re.search(r"[\s/@\[\]]", host) or not host:
            raise ValueError
        return host

    return Kind(read, "must be a host name or an IP address")


def _hosts() -> Kind:
    host = _host()

    def read(text: str) -> tuple[str, ...]:
        return tuple(host.read(part.strip()) for part in text.split(","))

    return Kind(read, "must be host names or IP addresses, separated by commas")


def _flag() -> Kind:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

    def read(text: str) -> bool:
        try:
            return words[text.lower()]
        except KeyError:
            raise ValueError from None

    return Kind(read, "must be true or false")


def _file() -> Kind:
    def read(text: str) -> str:
        try:
            with open(text, "rb"):
                return text
        except OSError as err:
            raise ValueError from err

    return Kind(read, "must be a file that can be read")


def _new_file() -> Kind:
    def read(text: str) -> str:
        if not os.access(os.path.dirname(text) or ".", os.W_OK) or os.path.isdir(text):
            raise ValueError
        return text

    return Kind(read, "must be a file in a folder that can be written")


def _identifier() -> Kind:
    def read(text: str) -> str:
        # it becomes part of a queue's name (255 bytes in AMQP) and of an event's source, which is a URI
        if not re.fullmatch(r"[A-Za-z0-9._~:@-]{1,200}", text):
            raise ValueError
        return text

    return Kind(read, "must be 1 to 200 letters, digits or any of . _ ~ : @ -")


def _short_name() -> Kind:
    def read(text: str) -> str:
        if len(text.encode()) > 255:
            raise ValueError
        return text

    return Kind(read, "must be at most 255 bytes long")


def _header_name() -> Kind:
    def read(text: str) -> str:
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", text):
            raise ValueError
        return text.lower()

    return Kind(read, "must be the name of an HTTP header")


def _header_token() -> Kind:
    def read(text: str) -> str:
        if not re.fullmatch(r"[\x21-\x7e]*", text):
            raise ValueError
        return text

    return Kind(read, "must be printable ASCII without white space")


# -- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable."""

    name: str
    #: where its value goes in `Config`: "section.field"
    target: str
    kind: Kind
    #: as it would be written in the environment; None: required
    default: str | None
    help: str
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Variables that belong together, in the order in which they are shown."""

    title: str
    variables: tuple[Variable, ...]


_DAY_S: Final = 86_400.0

GROUPS: Final[tuple[Group, ...]] = (
    Group(
        "RabbitMQ",
        (
            Variable(
                "RABBITMQ_HOST",
                "broker.hosts",
                _hosts(),
                "localhost",
                "Server host name or address, or several, separated by commas: tried in random order",
            ),
            Variable("RABBITMQ_PORT", "broker.port", _integer(1, 65535), "5672", "Server port"),
            Variable("RABBITMQ_USERNAME", "broker.username", _text(), "guest", "User name, taken literally"),
            Variable(
                "RABBITMQ_PASSWORD", "broker.password", _text(), "guest", "Password, taken literally", secret=True
            ),
            Variable("RABBITMQ_VHOST", "broker.vhost", _text(), "/", "Virtual host, taken literally"),
            Variable(
                "RABBITMQ_HEARTBEAT_S",
                "broker.heartbeat_s",
                _integer(1, 3600),
                "120",
                "Heartbeat interval; cannot be switched off",
            ),
            Variable(
                "RABBITMQ_PREFETCH",
                "broker.prefetch",
                _integer(1, 1024),
                "1",
                "Requests in work at once, and so the slots of this worker",
            ),
            Variable(
                "RABBITMQ_LOOKAHEAD",
                "broker.lookahead",
                _integer(0, 1024),
                "0",
                "Deliveries kept ready beyond the slots, so that a freed slot does not wait for the broker;"
                " not for a prefetch of 1: another replica would answer sooner",
            ),
            Variable(
                "RABBITMQ_MAX_RETRIES",
                "retry.max_retries",
                _integer(0, 1000),
                "1",
                "Retries of a request that the model could not be asked, before it is dead-lettered",
            ),
            Variable(
                "RABBITMQ_MAX_REDELIVERIES",
                "retry.max_redeliveries",
                _integer(0, 1000),
                "10",
                "Times that a request is begun again after a worker died with it, then dead-lettered; 0: no limit",
            ),
            Variable(
                "RABBITMQ_TLS", "broker.tls", _flag(), "false", "Speak TLS; the broker's port for it is usually 5671"
            ),
            Variable(
                "RABBITMQ_CA_FILE",
                "broker.ca_file",
                _file(),
                "",
                "Who may sign the broker's certificate; empty: the system's",
            ),
            Variable(
                "RABBITMQ_CERT_FILE",
                "broker.cert_file",
                _file(),
                "",
                "Our certificate, where the broker asks for one",
            ),
            Variable("RABBITMQ_KEY_FILE", "broker.key_file", _file(), "", "Its key, when it is not in the same file"),
            Variable(
                "RABBITMQ_QUEUE_TYPE",
                "broker.queue_type",
                _choice("classic", "quorum"),
                "",
                "Of the request queue and the dead-letter queue: `classic` or `quorum`; empty: the broker's default",
            ),
        ),
    ),
    Group(
        "Dead-lettering",
        (
            Variable("INFERENCE_DLX", "broker.dlx", _short_name(), "infer.dlx", "Dead-letter exchange"),
            Variable("INFERENCE_DLQ", "broker.dlq", _short_name(), "infer.dlq", "Dead-letter queue"),
            Variable(
                "INFERENCE_DLX_ROUTING_KEY", "broker.dlx_routing_key", _short_name(), "dead", "Routing key between them"
            ),
        ),
    ),
    Group(
        "Model",
        (
            Variable(
                "MODEL_CONTAINER_URL",
                "model.base_url",
                _model_base_url(),
                "http://localhost:8000",
                "Base URL of the model server, with or without /v1",
            ),
            Variable(
                "MODEL_INFER_PATH",
                "model.infer_path",
                _path(),
                "/v1/chat/completions",
                "Path of the inference endpoint",
            ),
            Variable(
                "MODEL_INFER_TIMEOUT_S",
                "model.infer_timeout_s",
                _seconds(0.1, _DAY_S),
                "300",
                "Bound on the whole exchange with the model, not on each read",
            ),
            Variable(
                "MODEL_INFER_RESPECT_DEADLINE",
                "model.respects_deadline",
                _flag(),
                "false",
                "End a call when the request's own time is over, with a 408; false: it may run on to its end",
            ),
            Variable(
                "CANCEL_POLL_INTERVAL_S",
                "model.cancel_poll_interval_s",
                _seconds(0.05, 3600, zero=True),
                "1",
                "How often Redis is asked whether running requests were cancelled (`infer_cancel:<request_id>`); "
                "0: never, and not before a call either",
            ),
            Variable(
                "MODEL_MAX_RESPONSE_BYTES",
                "model.max_response_bytes",
                _integer(1024, 512 * 2**20),
                "67108864",
                "Longest answer, decompressed; a longer one is a 502 (a Redis value ends at 512 MiB)",
            ),
            Variable(
                "MODEL_API_KEY", "model.api_key", _header_token(), "", "Sent as a Bearer token when set", secret=True
            ),
            Variable(
                "MODEL_RETRY_STATUS_CODES",
                "model.retry_status_codes",
                _status_codes(),
                "",
                'Statuses that mean "temporarily unavailable" and are retried, such as `429,503`',
            ),
            Variable(
                "MODEL_TTFT_HEADER",
                "model.ttft_header",
                _header_name(),
                "x-ttft-ms",
                "Header with the time to first token, ms",
            ),
            Variable(
                "MODEL_TBT_HEADER",
                "model.tbt_header",
                _header_name(),
                "x-time-per-token",
                "Header with the time between tokens, ms",
            ),
        ),
    ),
    Group(
        "Health",
        (
            Variable(
                "HEALTH_CHECK_INTERVAL_S", "health.interval_s", _seconds(0.1, 3600), "10", "Time between two probes"
            ),
            Variable("HEALTH_CHECK_PATH", "health.path", _path(), "/health", "Path of the probe"),
            Variable("HEALTH_CHECK_TIMEOUT_S", "health.timeout_s", _seconds(0.1, 600), "5", "Bound on one probe"),
            Variable(
                "HEALTH_FAILURE_THRESHOLD",
                "health.failure_threshold",
                _integer(1, 100),
                "1",
                "Probes that fail in a row before the consuming stops",
            ),
            Variable(
                "HEALTH_SUCCESS_THRESHOLD",
                "health.success_threshold",
                _integer(1, 100),
                "1",
                "Good probes in a row before it begins again",
            ),
            Variable(
                "HEALTH_STALL_TIMEOUT_S",
                "health.stall_timeout_s",
                _seconds(0, _DAY_S),
                "0",
                "Requests are in work and the model's token counters have not moved for so long: unhealthy; 0: off",
            ),
        ),
    ),
    Group(
        "Redis",
        (
            Variable(
                "REDIS_URL",
                "store.url",
                _redis_url(),
                "redis://localhost:6379",
                "Connection URL; a password in it wins over REDIS_PASSWORD",
                secret=True,
            ),
            Variable("REDIS_PASSWORD", "store.password", _text(), "", "AUTH password, taken literally", secret=True),
            Variable(
                "REDIS_RESPONSE_TTL_S",
                "store.ttl_s",
                _integer(1, 10 * 365 * 86_400),
                "3600",
                "How long a result stays",
            ),
            Variable(
                "REDIS_RETRY_DELAY_S",
                "store.retry_delay_s",
                _seconds(0.1, 3600),
                "10",
                "Pause between two tries to write while Redis is down",
            ),
            Variable(
                "REDIS_TIMEOUT_S",
                "store.timeout_s",
                _seconds(0.1, 600),
                "5",
                "Bound on one command, its retry included",
            ),
        ),
    ),
    Group(
        "Metrics",
        (
            Variable("METRIC_SERVER_URL", "metrics.server_url", _base_url(), None, "Base URL of MetricServer"),
            Variable(
                "METRIC_SERVER_SERVICE_TOKEN",
                "metrics.service_token",
                _header_token(),
                None,
                "Bearer token for MetricServer",
                secret=True,
            ),
            Variable(
                "METRICS_FLUSH_INTERVAL_S",
                "metrics.flush_interval_s",
                _seconds(0.1, _DAY_S),
                "30",
                "Time between two flushes",
            ),
            Variable(
                "METRICS_BUFFER_SIZE",
                "metrics.buffer_size",
                _integer(1, 10_000_000),
                "10000",
                "Records kept between two flushes; the oldest are dropped and counted",
            ),
            Variable(
                "METRICS_HTTP_TIMEOUT_S",
                "metrics.http_timeout_s",
                _seconds(0.1, 600),
                "5",
                "Bound on one scrape and on one request to a sink",
            ),
            Variable(
                "VLLM_METRICS_URL",
                "metrics.vllm_url",
                _http_url(),
                "",
                "The model's Prometheus page; empty: MODEL_CONTAINER_URL/metrics",
            ),
            Variable(
                "DCGM_METRICS_URL",
                "metrics.dcgm_url",
                _http_url(),
                "",
                "The DCGM exporter's page; empty: no GPU metrics",
            ),
        ),
    ),
    Group(
        "Billing",
        (
            Variable("CROESUS_HOST", "billing.croesus_url", _base_url(), None, "Base URL of Croesus"),
            Variable("CROESUS_BATCH_SIZE", "billing.batch_size", _integer(1, 1000), "1", "Usage events in one request"),
            Variable(
                "USAGE_OUTBOX_PATH",
                "billing.outbox_path",
                _new_file(),
                "",
                "SQLite file, of this worker alone, in which usage events survive a kill; empty: memory only",
            ),
            Variable(
                "CROESUS_SERVICE_TOKEN",
                "billing.service_token",
                _header_token(),
                "",
                "Bearer token for Croesus, sent when set",
                secret=True,
            ),
        ),
    ),
    Group(
        "Identity",
        (
            Variable(
                "DEPLOYMENT_ID",
                "identity.deployment_id",
                _identifier(),
                None,
                "Deployment; names the queue `infer_req.<DEPLOYMENT_ID>`",
            ),
            Variable("REPLICA_ID", "identity.replica_id", _identifier(), None, "This replica"),
            Variable("USER_ID", "identity.user_id", _text(), None, "Owner"),
            Variable("ORG_ID", "identity.org_id", _text(), "", "Organization"),
            Variable("HF_MODEL_ID", "identity.model_id", _text(), None, "HuggingFace model"),
        ),
    ),
    Group(
        "The process",
        (
            Variable(
                "SHUTDOWN_GRACE_S",
                "process.grace_s",
                _seconds(0, 3600),
                "25",
                "Time that requests in work have to end after SIGTERM",
            ),
            Variable(
                "WORKER_HTTP_HOST", "process.http_host", _host(), "127.0.0.1", "Where /healthz and /readyz listen"
            ),
            Variable("WORKER_HTTP_PORT", "process.http_port", _integer(0, 65535), "9464", "Their port; 0: off"),
            Variable(
                "LOG_LEVEL",
                "process.log_level",
                _choice("DEBUG", "INFO", "WARNING", "ERROR"),
                "INFO",
                "Least level that is logged",
            ),
            Variable("LOG_FORMAT", "process.log_format", _choice("text", "json"), "text", "`json`: one object a line"),
        ),
    ),
)

VARIABLES: Final[tuple[Variable, ...]] = tuple(variable for group in GROUPS for variable in group.variables)


# -- the values -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """RabbitMQ."""

    hosts: tuple[str, ...]
    port: int
    username: str
    password: str = field(repr=False)
    vhost: str
    heartbeat_s: int
    prefetch: int
    lookahead: int
    tls: bool
    ca_file: str
    cert_file: str
    key_file: str
    #: "classic", "quorum" or "" (the broker's default)
    queue_type: str
    dlx: str
    dlq: str
    dlx_routing_key: str


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """How often a request is tried."""

    max_retries: int
    #: 0: no limit
    max_redeliveries: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model server."""

    #: without a trailing slash and without /v1
    base_url: str
    infer_path: str
    infer_timeout_s: float
    respects_deadline: bool
    #: 0: nothing can be cancelled
    cancel_poll_interval_s: float
    max_response_bytes: int
    api_key: str = field(repr=False)
    retry_status_codes: frozenset[int]
    ttft_header: str
    tbt_header: str


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Probing."""

    interval_s: float
    path: str
    timeout_s: float
    failure_threshold: int
    success_threshold: int
    #: 0: off
    stall_timeout_s: float


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Redis."""

    url: str = field(repr=False)
    password: str = field(repr=False)
    ttl_s: int
    retry_delay_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """MetricServer and the sources of its numbers."""

    server_url: str
    service_token: str = field(repr=False)
    flush_interval_s: float
    buffer_size: int
    http_timeout_s: float
    vllm_url: str
    dcgm_url: str


@dataclass(frozen=True, slots=True)
class BillingConfig:
    """Croesus."""

    croesus_url: str
    batch_size: int
    #: empty: memory only
    outbox_path: str
    service_token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class IdentityConfig:
    """Who this worker is and for whom it works."""

    deployment_id: str
    replica_id: str
    user_id: str
    org_id: str
    model_id: str

    @property
    def queue(self) -> str:
        return f"infer_req.{self.deployment_id}"


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """Stopping, logging, the status page."""

    grace_s: float
    http_host: str
    http_port: int
    log_level: str
    log_format: str


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that the environment says, checked. A class receives only the part that it needs."""

    broker: BrokerConfig
    retry: RetryConfig
    model: ModelConfig
    health: HealthConfig
    store: StoreConfig
    metrics: MetricsConfig
    billing: BillingConfig
    identity: IdentityConfig
    process: ProcessConfig


_SECTIONS: Final[dict[str, type[Any]]] = {
    "broker": BrokerConfig,
    "retry": RetryConfig,
    "model": ModelConfig,
    "health": HealthConfig,
    "store": StoreConfig,
    "metrics": MetricsConfig,
    "billing": BillingConfig,
    "identity": IdentityConfig,
    "process": ProcessConfig,
}


def load_environment() -> dict[str, str]:
    """Read the process's environment over the `.env` file of the working directory, which it wins over.

    Raises:  ConfigError, when there is a `.env` that cannot be read
    """
    try:
        # a `${` in a password is taken literally like everything else
        found = dotenv.dotenv_values(".env", interpolate=False)
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError((Fault(".env", None, f"must be a readable UTF-8 file ({type(err).__name__})"),)) from err
    return {**{name: value for name, value in found.items() if value is not None}, **os.environ}


def load_config(environment: Mapping[str, str]) -> Config:
    """Check every variable and build the `Config`.

    Raises:  ConfigError, with every fault
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    faults: list[Fault] = []
    for variable in VARIABLES:
        section, _, name = variable.target.partition(".")
        try:
            values[section][name] = _value(variable, environment)
        except ConfigError as err:
            faults.extend(err.faults)
    if faults:
        raise ConfigError(tuple(faults))
    if not values["metrics"]["vllm_url"]:
        values["metrics"]["vllm_url"] = values["model"]["base_url"] + "/metrics"
    return Config(**{section: kind(**values[section]) for section, kind in _SECTIONS.items()})


def _value(variable: Variable, environment: Mapping[str, str]) -> Any:
    given = clean(environment.get(variable.name, "")) or _value_of_file(variable, environment)
    text = given or variable.default
    if text is None:
        raise ConfigError((Fault(variable.name, None, f"is required: {_uncapitalise(variable.help)}"),))
    if text == "":
        # an empty default means "not set", which no rule has to allow for
        return frozenset() if variable.target == "model.retry_status_codes" else ""
    try:
        # the environment may hold bytes that are no UTF-8, which nobody could send on
        text.encode()
        return variable.kind.read(text)
    except ValueError:
        shown = None if variable.secret else given
        raise ConfigError((Fault(variable.name, shown, variable.kind.rule),)) from None


def _value_of_file(variable: Variable, environment: Mapping[str, str]) -> str:
    """Read a secret from the file that `<NAME>_FILE` names, as container platforms mount them; "" without one."""
    path = clean(environment.get(f"{variable.name}_FILE", "")) if variable.secret else ""
    if not path:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            return clean(file.read())
    except (OSError, UnicodeDecodeError) as err:
        rule = f"must be a text file that can be read ({type(err).__name__})"
        raise ConfigError((Fault(f"{variable.name}_FILE", path, rule),)) from err


def clean(text: str) -> str:
    """Take off surrounding white space, one pair of quotes, and what white space they held (field report R76)."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1].strip()
    return text


def _uncapitalise(sentence: str) -> str:
    return sentence if sentence[:2].isupper() else sentence[:1].lower() + sentence[1:]


def effective_values(config: Config) -> list[tuple[Variable, str]]:
    """List what each variable has come to, without any secret."""
    shown = []
    for variable in VARIABLES:
        section, _, name = variable.target.partition(".")
        value = getattr(getattr(config, section), name)
        if variable.secret:
            value = "(set)" if value else "(not set)"
        elif isinstance(value, frozenset | tuple):
            value = ",".join(sorted(map(str, value)))
        elif isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, float):
            value = f"{value:g}"
        shown.append((variable, str(value)))
    return shown


def to_markdown() -> str:
    """Write the README's table."""
    lines: list[str] = []
    for group in GROUPS:
        lines += [f"**{group.title}**", "", "| Variable | Default | |", "|---|---|---|"]
        for variable in group.variables:
            default = (
                "required" if variable.default is None else f"`{variable.default}`" if variable.default else "(empty)"
            )
            rule = "" if variable.kind.rule == "must be a text" else f"; {variable.kind.rule}"
            lines.append(f"| `{variable.name}` | {default} | {variable.help}{rule} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def to_text() -> str:
    """Write the table of `--help`."""
    width = max(len(variable.name) for variable in VARIABLES) + 2
    lines: list[str] = []
    for group in GROUPS:
        lines += ["", f"{group.title}:"]
        for variable in group.variables:
            default = (
                "required"
                if variable.default is None
                else f"default {variable.default}"
                if variable.default
                else "optional"
            )
            lines.append(f"  {variable.name:<{width}}{variable.help} ({default})")
            if variable.kind.rule != "must be a text":
                lines.append(" " * (width + 4) + variable.kind.rule)
    return "\n".join(lines) + "\n"
