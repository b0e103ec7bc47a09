"""The house: who may import what, and what may be said in one place only. Parsed from the source, not imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "inference_worker"
FOLDER = Path(__file__).parents[2] / PACKAGE
TREES = {path.stem: ast.parse(path.read_text(), str(path)) for path in sorted(FOLDER.rglob("*.py"))}

#: imports point down this list only: from a line to lines above it
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__init__",),
    # words: no I/O, no clock, no threads
    ("errors", "json_text"),
    ("messages", "model_answer", "documents", "json_spans", "event_stream"),
    ("model_stream", "whole_chunk", "stream_request", "http_request", "disposition"),
    # edges of memory
    (
        "delivery",
        "deadlines",
        "holds",
        "kept_answers",
        "running_requests",
        "metrics_buffer",
        "config",
        "stall_watch",
        "growing_pause",
        "trouble",
    ),
    ("slots", "cancel_watch", "helper_thread"),
    # adapters
    ("http_response",),
    (
        *("http_connection", "redis_client", "amqp_headers", "metrics_scraper", "usage_events"),
        *("usage_outbox", "logs", "status_server", "healthcheck"),
    ),
    ("amqp_connection",),
    ("http_client", "amqp_topology", "message_publisher", "result_store", "stream_store"),
    ("rmq_listener",),
    # steps and services
    ("stream_reader", "metrics_source", "usage_sender"),
    ("model_client",),
    ("message_processor", "health_checker", "metrics_reporter"),
    # life
    ("supervisor",),
    # wiring
    ("app",),
    ("check",),
    ("cli",),
    ("__main__",),
)

#: no I/O, no clock, no threads
WORDS = (
    *("errors", "json_text", "messages", "model_answer", "documents", "json_spans", "event_stream"),
    *("model_stream", "whole_chunk", "stream_request", "http_request", "disposition", "delivery"),
)
_NOT_IN_WORDS = {"os", "io", "socket", "threading", "time", "asyncio", "subprocess", "queue", "logging", "random"}

#: what each file knows beside the standard library; a file that is not here knows nothing
LIBRARIES: dict[str, set[str]] = {
    "messages": {"msgspec"},
    "model_answer": {"msgspec"},
    "model_stream": {"msgspec"},
    "json_spans": {"msgspec"},
    "whole_chunk": {"msgspec"},
    "stream_request": {"msgspec"},
    "documents": {"msgspec"},
    "config": {"dotenv"},
    "http_connection": {"requests", "urllib3"},
    "http_client": {"urllib3"},
    "redis_client": {"redis"},
    "result_store": {"redis"},
    "stream_store": {"redis"},
    "amqp_headers": {"pika"},
    "amqp_connection": {"pika"},
    "amqp_topology": {"pika"},
    "message_publisher": {"pika"},
    "rmq_listener": {"pika", "tenacity"},
    "metrics_scraper": {"prometheus_client"},
    "usage_events": {"cloudevents"},
    "logs": {"pythonjsonlogger"},
}

#: adapters that share a library, and so may share a file
FAMILIES = (
    {"http_response", "http_connection", "http_client"},
    {"amqp_headers", "amqp_connection", "amqp_topology", "message_publisher", "rmq_listener"},
    {"redis_client", "result_store", "stream_store"},
)
ADAPTERS = {*LIBRARIES, "http_response", "status_server", "healthcheck"} - {*WORDS, "config"}

#: steps and services are handed their adapters; these two only turn text into numbers and numbers into text
STEPS: dict[str, set[str]] = {
    "stream_reader": set(),
    "model_client": set(),
    "message_processor": set(),
    "health_checker": set(),
    "metrics_source": set(),
    "usage_sender": {"usage_events"},
    "metrics_reporter": {"metrics_scraper"},
    "supervisor": set(),
}

#: where an exception nobody expected may be caught
BROAD_EXCEPTS = {
    # around one message
    "message_processor.MessageProcessor.process",
    "message_processor.MessageProcessor._conclude_bug",
    # around a service's loop
    "supervisor._ServiceThread._run",
    # carried to the owner's thread, and raised there
    "helper_thread.HelperThread._run",
}


def _imports(name: str) -> Iterator[str]:
    """Yield every module that a file imports, anywhere in it; our own with the package's name before it."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            for alias in node.names:
                is_module = node.module == PACKAGE and alias.name in TREES
                yield f"{PACKAGE}.{alias.name}" if is_module else str(node.module)


def _own_imports(name: str) -> set[str]:
    parts = [module.split(".") for module in _imports(name)]
    return {part[1] if len(part) > 1 else "__init__" for part in parts if part[0] == PACKAGE}


def _foreign_imports(name: str) -> set[str]:
    return {module.split(".")[0] for module in _imports(name)} - {PACKAGE, "__future__"}


def _nodes(name: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node of a file with the dotted name of the function or class that holds it."""

    def walk(node: ast.AST, place: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            is_named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
            yield place, child
            yield from walk(child, f"{place}.{child.name}" if is_named else place)

    return walk(TREES[name], name)


def _places_that_name(*words: str) -> set[str]:
    """Return where any of these attributes, names or imported names is mentioned."""
    places = set()
    for module in TREES:
        for place, node in _nodes(module):
            is_attribute = isinstance(node, ast.Attribute) and node.attr in words
            is_name = isinstance(node, ast.Name) and node.id in words
            is_import = isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} & set(words)
            if is_attribute or is_name or is_import:
                places.add(place)
    return places


MODULES = pytest.mark.parametrize("name", TREES)


def test_every_file_has_one_layer() -> None:
    assert sorted(name for layer in LAYERS for name in layer) == sorted(TREES)


def test_the_package_is_flat() -> None:
    assert len(TREES) == len(list(FOLDER.glob("*.py")))


@MODULES
def test_imports_point_downwards(name: str) -> None:
    height = {module: number for number, layer in enumerate(LAYERS) for module in layer}
    wrong = {module for module in _own_imports(name) if height[module] >= height[name]}
    assert wrong == set(), f"{name} imports what is not below it"


@MODULES
def test_each_library_is_known_only_where_it_belongs(name: str) -> None:
    assert _foreign_imports(name) - sys.stdlib_module_names == LIBRARIES.get(name, set())


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_no_adapter_knows_an_adapter_of_another_library(name: str) -> None:
    family = next((family for family in FAMILIES if name in family), {name})
    assert (_own_imports(name) & ADAPTERS) <= family


@pytest.mark.parametrize("name", STEPS)
def test_steps_and_services_are_handed_their_adapters(name: str) -> None:
    assert _own_imports(name) & ADAPTERS == STEPS[name]


@pytest.mark.parametrize("name", WORDS)
def test_words_do_no_io_and_know_no_clock_and_no_threads(name: str) -> None:
    assert _foreign_imports(name) & _NOT_IN_WORDS == set()
    assert name not in {place.split(".")[0] for place in _places_that_name("open", "print")}


@MODULES
def test_nothing_private_is_imported_from_another_file(name: str) -> None:
    private = [
        alias.name
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        for alias in node.names
        if alias.name.startswith("_") and alias.name != "__version__"
    ]
    assert private == []


@MODULES
def test_every_file_says_what_it_is_for(name: str) -> None:
    assert ast.get_docstring(TREES[name])


@MODULES
def test_every_public_class_and_function_of_a_file_has_a_docstring(name: str) -> None:
    public = [
        node
        for node in TREES[name].body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
    ]
    assert [node.name for node in public if not ast.get_docstring(node)] == []


def test_the_environment_is_read_in_config_alone() -> None:
    assert {place.split(".")[0] for place in _places_that_name("environ", "environb", "getenv")} == {"config"}


def test_law_2_acks_and_nacks_are_made_in_one_function() -> None:
    assert _places_that_name("basic_ack", "basic_nack", "basic_reject", "basic_recover") == {
        "rmq_listener.RmqListener.settle"
    }


def test_copies_are_published_in_one_file() -> None:
    assert {place.split(".")[0] for place in _places_that_name("basic_publish")} == {"message_publisher"}


def test_r08_no_settlement_is_for_several_messages() -> None:
    keywords = {
        place
        for module in TREES
        for place, node in _nodes(module)
        if isinstance(node, ast.keyword) and node.arg == "multiple"
    }
    assert keywords == set()


def test_law_5_nothing_sleeps() -> None:
    assert _places_that_name("sleep") == set()


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in kinds
    )


def test_law_6_what_nobody_expected_is_caught_in_few_places() -> None:
    places = {
        place
        for module in TREES
        for place, node in _nodes(module)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node)
    }
    assert places == BROAD_EXCEPTS


def test_nothing_is_suppressed_whatever_it_is() -> None:
    broad = {
        place
        for module in TREES
        for place, node in _nodes(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "suppress"
        and any(isinstance(arg, ast.Name) and arg.id in ("Exception", "BaseException") for arg in node.args)
    }
    assert broad == set()


def test_every_total_match_is_checked_to_be_total() -> None:
    # the type checker finds a missing branch only where a match ends in assert_never
    tree = next(node for place, node in _nodes("disposition") if getattr(node, "name", "") == "decide_disposition")
    (match,) = [node for node in ast.walk(tree) if isinstance(node, ast.Match)]
    assert "assert_never" in ast.unparse(match.cases[-1])
