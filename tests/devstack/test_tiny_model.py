"""The tiny model is the same bytes each time, and what its files say of each other agrees."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path

from devstack.tiny_model import TOOL_CALL_TOKEN, write_model


def test_the_same_bytes_each_time(tmp_path: Path) -> None:
    first, second = write_model(tmp_path / "first"), write_model(tmp_path / "second")
    names = sorted(file.name for file in first.iterdir())
    assert "model.safetensors" in names
    assert [(first / name).read_bytes() for name in names] == [(second / name).read_bytes() for name in names]


def test_the_weights_are_those_that_the_header_and_the_configuration_promise(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    content = (model / "model.safetensors").read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + header_bytes])
    assert header.pop("__metadata__") == {"format": "pt"}
    numbers = content[8 + header_bytes :]
    end = 0
    for tensor in header.values():
        begin, end = end, tensor["data_offsets"][1]
        assert tensor["data_offsets"][0] == begin
        assert end - begin == 4 * prod(tensor["shape"])
    assert end == len(numbers)
    config = json.loads((model / "config.json").read_text())
    assert header["lm_head.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert len({name.split(".")[2] for name in header if ".layers." in name}) == config["num_hidden_layers"]


def test_each_byte_is_a_token(tmp_path: Path) -> None:
    tokenizer = json.loads((write_model(tmp_path) / "tokenizer.json").read_text())
    config = json.loads((tmp_path / "config.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(config["vocab_size"]))
    assert len([token for token in vocabulary if len(token) == 1]) == 256
    assert vocabulary["<tool_call>"] == TOOL_CALL_TOKEN
