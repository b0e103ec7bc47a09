"""Write a Llama of random weights that any server of Hugging Face models can load: 130,000 numbers, one token a byte.

It says nothing sensible, always the same to the same prompt, in milliseconds. Pure Python: no torch, no tokenizers. The
weights are far apart, so that the most likely token does not depend on how the server rounds, caches or batches. It
never ends by itself, so that the length of an answer is what was asked for.
"""

from __future__ import annotations

import array
import json
import math
import random
import struct
from pathlib import Path

_SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>")
#: what vLLM's parser "hermes" looks for in the vocabulary; part of the text, unlike those above
_TOOL_TOKENS = ("<tool_call>", "</tool_call>")
#: the id of <tool_call>, for whoever wants the model to be biased to it
TOOL_CALL_TOKEN = len(_SPECIAL_TOKENS) + 256
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_HIDDEN, _INNER, _LAYERS, _HEADS, _KEY_HEADS, _HEAD = 64, 128, 2, 4, 2, 32
#: tokens, prompt and answer together; a server may be told less
CONTEXT_TOKENS = 32768
_SEED = 20
#: by what the output's weights are multiplied: text that can be read, with some letters of several bytes, and no end
_PRINTABLE_SCALE, _OTHER_SCALE, _SPECIAL_SCALE = 1.0, 0.75, 0.0


def write_model(folder: Path) -> Path:
    """Write configuration, tokenizer and weights into a folder, the same bytes each time, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = [*_SPECIAL_TOKENS, *_byte_letters(), *_TOOL_TOKENS]
    documents = {
        "config.json": _config(len(vocabulary)),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer.json": _tokenizer(vocabulary),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": CONTEXT_TOKENS,
            "chat_template": _CHAT_TEMPLATE,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1))
    (folder / "model.safetensors").write_bytes(_weights(len(vocabulary)))
    return folder


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level vocabulary: printable ones for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _tokenizer(vocabulary: list[str]) -> dict[str, object]:
    """Return a byte-level BPE without merges: each byte is a token."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": vocabulary.index(token), "content": token, "special": token in _SPECIAL_TOKENS, **flags}
        for token in (*_SPECIAL_TOKENS, *_TOOL_TOKENS)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(vocabulary)},
            "merges": [],
        },
    }


def _config(vocabulary_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KEY_HEADS,
        "head_dim": _HEAD,
        "vocab_size": vocabulary_size,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }


def _shapes(vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary_size, _HIDDEN)}
    for number in range(_LAYERS):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (_HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (_HEADS * _HEAD, _HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (_KEY_HEADS * _HEAD, _HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (_KEY_HEADS * _HEAD, _HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (_HIDDEN, _HEADS * _HEAD),
            f"{layer}.post_attention_layernorm.weight": (_HIDDEN,),
            f"{layer}.mlp.gate_proj.weight": (_INNER, _HIDDEN),
            f"{layer}.mlp.up_proj.weight": (_INNER, _HIDDEN),
            f"{layer}.mlp.down_proj.weight": (_HIDDEN, _INNER),
        }
    return shapes | {"model.norm.weight": (_HIDDEN,), "lm_head.weight": (vocabulary_size, _HIDDEN)}


def _weights(vocabulary_size: int) -> bytes:
    """Return the weights as a safetensors file: the header's length, the header, the numbers."""
    random_numbers = random.Random(_SEED)
    header, numbers = {}, array.array("f")
    for name, shape in _shapes(vocabulary_size).items():
        begin = len(numbers) * numbers.itemsize
        if len(shape) == 1:
            numbers.extend([1.0] * shape[0])  # a norm
        else:
            for row in range(shape[0]):
                spread = 2.0 / math.sqrt(shape[1]) * (_output_scale(row) if name == "lm_head.weight" else 1.0)
                numbers.extend(random_numbers.gauss(0.0, spread) for _ in range(shape[1]))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(numbers) * numbers.itemsize]}
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    encoded += b" " * (-len(encoded) % 8)  # the numbers begin where a double may
    return struct.pack("<Q", len(encoded)) + encoded + numbers.tobytes()


def _output_scale(token: int) -> float:
    byte = token - len(_SPECIAL_TOKENS)
    if not 0 <= byte < 256:
        return _SPECIAL_SCALE
    return _PRINTABLE_SCALE if 0x20 <= byte < 0x7F else _OTHER_SCALE
