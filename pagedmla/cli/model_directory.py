"""Loads a language model from a directory, or says in one sentence what is wrong with the directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedmla.contract.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to generate.

    Attributes:
        model: a Transformers causal language model in eval mode, on its device.
        encode: text to token ids, with what the model expects at the beginning of a text.
        decode: token ids to text, without tokens that only mark an end.
        directory: where all of it came from.
    """

    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    directory: Path


def check_model_directory(directory: Path) -> None:
    """Reads the files' headers without loading any weight.

    Raises:
        InvalidArgument: the directory is absent, has no readable ``config.json``, is not of an MLA model, or
            its ``*.safetensors`` files are missing, cut short or not in that format.
    """
    if not directory.is_dir():
        raise _wrong(directory, "not a directory" if directory.exists() else "no such directory")
    config = _read_json(directory, "config.json")
    _check_is_mla(directory, config)
    for file in _weight_files(directory):
        _check_safetensors(directory, file)


def load_model(directory: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Loads the model and the tokenizer of ``directory``; no network, no remote code.

    Raises:
        InvalidArgument: what ``check_model_directory`` finds, or Transformers cannot build the model from the
            files, or the files lack weights that the model has.
    """
    check_model_directory(directory)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            # code in the directory is never run, and never asked about
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except _loading_errors() as error:
        raise _wrong(directory, f"Transformers cannot load it: {_first_line(error)}") from error
    absent = sorted(report["missing_keys"])
    if absent:
        # from_pretrained fills these with random numbers and goes on: text from such a model would be noise
        raise _wrong(directory, f"its files lack {len(absent)} of the model's weights, {absent[0]} first")
    encode, decode = _load_tokenizer(directory)
    return LoadedModel(model.eval().to(device), encode, decode, directory)


def _load_tokenizer(directory: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    from pagedmla import embedded

    if directory.resolve() == embedded.model_dir().resolve():
        return _byte_tokenizer()
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except _loading_errors() as error:
        raise _wrong(directory, f"no tokenizer loads from it: {_first_line(error)}") from error
    return tokenizer.encode, partial(tokenizer.decode, skip_special_tokens=True)


def _loading_errors() -> tuple[type[Exception], ...]:
    """What Transformers raises on a directory that it cannot make a model of."""
    from huggingface_hub.errors import StrictDataclassError

    kinds = (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        IndexError,
        ArithmeticError,
    )
    return (*kinds, StrictDataclassError)


def _byte_tokenizer() -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """The embedded model's ids are bytes; a passage begins with one that is in no text."""
    from pagedmla.embedded import byte_tokenizer

    def decode(ids: list[int]) -> str:
        return byte_tokenizer.decode(byte for byte in ids if byte != byte_tokenizer.EOS_ID)

    return partial(byte_tokenizer.encode, bos=True), decode


def _check_is_mla(directory: Path, config: dict[str, Any]) -> None:
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, dict) else config
    rank = inner.get("kv_lora_rank")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        kind = inner.get("model_type", "unknown")
        raise _wrong(directory, f"config.json (model_type {kind}) has no kv_lora_rank: not an MLA model")


def _weight_files(directory: Path) -> list[str]:
    if (directory / _INDEX).exists():
        weight_map = _read_json(directory, _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise _wrong(directory, f"{_INDEX} has no weight_map")
        return sorted({str(file) for file in weight_map.values()})
    if not (directory / "model.safetensors").exists():
        raise _wrong(directory, f"neither model.safetensors nor {_INDEX} is in it")
    return ["model.safetensors"]


def _check_safetensors(directory: Path, file: str) -> None:
    import safetensors

    if not (directory / file).is_file():
        raise _wrong(directory, f"{file} is missing")
    try:
        # the header is read, and its offsets are compared with the file's size
        with safetensors.safe_open(directory / file, framework="pt") as handle:
            handle.keys()
    except (safetensors.SafetensorError, OSError) as error:
        raise _wrong(directory, f"{file} is damaged: {_first_line(error)}") from error


def _read_json(directory: Path, file: str) -> dict[str, Any]:
    try:
        content = json.loads((directory / file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _wrong(directory, f"no {file} in it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(directory, f"{file} cannot be read: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise _wrong(directory, f"{file} holds a {type(content).__name__}, not an object")
    return content


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _wrong(directory: Path, reason: str) -> InvalidArgument:
    wanted = "a directory with config.json and *.safetensors of an MLA model"
    return InvalidArgument("model_directory", "model", wanted, f"{directory}: {reason}")
