"""Lines for people and lines for machines, with the same fields."""

from __future__ import annotations

import json
import logging
import re

import pytest

from inference_worker import logs

pytestmark = pytest.mark.usefixtures("restored_logging")

LOGGER = logging.getLogger("inference_worker.test")


def test_text_line_has_time_level_thread_sentence_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(level="INFO", log_format="text")
    LOGGER.info("served %s", "r-1", extra={"event": "settled", "request_id": "r-1", "elapsed_s": 0.5, "status": None})
    out, err = capsys.readouterr()
    assert out == ""
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO +MainThread +served r-1  \[(.*)\]\n"
    line = re.fullmatch(pattern, err)
    assert line is not None, err
    assert line[1] == "event=settled request_id=r-1 elapsed_s=0.5"


def test_field_with_white_space_or_none_of_text_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(level="INFO", log_format="text")
    LOGGER.info("x", extra={"detail": "a\nb c", "empty": ""})
    assert capsys.readouterr().err.endswith("[detail='a\\nb c' empty='']\n")


def test_json_line_is_one_object_with_the_same_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(level="INFO", log_format="json")
    LOGGER.warning("two\nlines", extra={"event": "held", "holds": ["draining"]})
    (line,) = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert fields.pop("timestamp")
    assert fields == {
        "level": "WARNING",
        "thread": "MainThread",
        "logger": "inference_worker.test",
        "message": "two\nlines",
        "event": "held",
        "holds": ["draining"],
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_traceback_is_written(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    logs.set_up(level="INFO", log_format=log_format)
    try:
        raise RuntimeError("here")
    except RuntimeError:
        LOGGER.exception("a bug")
    err = capsys.readouterr().err
    assert "RuntimeError: here" in err
    assert log_format == "text" or len(err.splitlines()) == 1


def test_level_is_the_workers_own(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(level="ERROR", log_format="text")
    LOGGER.warning("not this")
    LOGGER.error("this")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["this"]


def test_r80_debug_is_not_the_libraries_debug(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(level="DEBUG", log_format="text")
    for name in ("pika", "pika.connection", "urllib3.connectionpool", "redis", "requests", "tenacity"):
        logging.getLogger(name).debug("S3cret")
        logging.getLogger(name).info("S3cret")
    # pika logs each failed connect as an error, with a traceback
    logging.getLogger("pika.adapters").error("S3cret")
    # urllib3 logs the URL of an answer whose head it cannot parse
    logging.getLogger("urllib3.connection").warning("S3cret")
    LOGGER.debug("ours")
    err = capsys.readouterr().err
    assert "S3cret" not in err
    assert "ours" in err


def test_setting_up_twice_writes_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(level="INFO", log_format="text")
    logs.set_up(level="INFO", log_format="text")
    LOGGER.info("once")
    assert capsys.readouterr().err.count("once") == 1
