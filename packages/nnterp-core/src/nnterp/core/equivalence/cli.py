"""``nnterp compare``: do two engines compute the same on this checkpoint?

Ends with 0 where every value agrees, with 1 where one departs, with 2 where it could not run.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import logging
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._report import Report, Spec

AGREE, DEPART, COULD_NOT_RUN = 0, 1, 2

_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

_EPILOG = """\
a side is ENGINE or ENGINE:KEY=VALUE,...; a key is an option of the engine's class, or checkpoint

  nnterp compare CHECKPOINT                                      transformers and vLLM
  nnterp compare CHECKPOINT --dtype bfloat16 --html report.html  in the dtype you use
  nnterp compare CHECKPOINT --a hf:dtype=float32 --b hf:dtype=bfloat16
  nnterp compare CHECKPOINT --a hf:attn_implementation=eager --b hf:attn_implementation=sdpa
  nnterp compare NAME --a hf:revision=v1 --b hf:revision=v2
  nnterp compare CHECKPOINT --b vllm:tensor_parallel_size=2

ends with 0 where every value agrees, 1 where one departs, 2 where it could not run
"""


def hush() -> None:
    """Keep what the engines say about themselves off the screen, unless the environment asks."""
    for name, setting in _QUIET.items():
        os.environ.setdefault(name, setting)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="nnterp", description="Standard names for model internals.")
    commands = top.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "compare",
        help="compare two engines value by value on a checkpoint",
        description="Compare two engines, or one engine twice, value by value on a checkpoint.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder, or a name on the hub")
    one.add_argument("--engines", default="hf,vllm", help="the two engines (default: %(default)s)")
    one.add_argument("--a", metavar="SIDE", help="the first side, in place of the first engine")
    one.add_argument("--b", metavar="SIDE", help="the second side, in place of the second engine")
    one.add_argument("--dtype", help="the dtype of both (default: what the first one loads)")
    one.add_argument(
        "--prompts",
        metavar="FILE",
        help="a prompt a line, or .json/.jsonl: strings, lists of token ids, chats",
    )
    one.add_argument(
        "--values",
        default="all",
        help="names or paths, by commas, with wildcards: layer_output,layers.*.mlp.*",
    )
    one.add_argument("--steps", type=int, default=2, help="decode steps (default: %(default)s)")
    one.add_argument(
        "--together", type=int, default=8, help="prompts at a time (default: %(default)s)"
    )
    one.add_argument("--seed", type=int, default=0, help="of random prompts, without a tokenizer")
    one.add_argument(
        "--no-yardstick",
        action="store_true",
        help="no float32 runs: stated bounds say what the dtype explains",
    )
    one.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    one.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
    one.add_argument("--png", type=Path, metavar="FILE", help="write a heat map, layer by value")
    one.add_argument("--quiet", action="store_true", help="no word on how far it is")
    one.add_argument("--traceback", action="store_true", help="where it could not run, show where")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = parser().parse_args(arguments)
    hush()
    try:
        report = _compared(options)
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        said = str(error).strip() or type(error).__name__
        print(f"nnterp compare: could not run: {said}", file=sys.stderr)
        return COULD_NOT_RUN
    print(report)
    return AGREE if report.agree else DEPART


def _compared(options: argparse.Namespace) -> Report:
    # Whatever is wrong in the call is said before anything is loaded.
    a, b = sides(options)
    a.check_engine()
    b.check_engine()
    prompts = None if options.prompts is None else read_prompts(Path(options.prompts))
    outputs = [options.json, options.html, options.png]
    for path in outputs:
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"{path} cannot be written: {path.parent} is no folder")
    if options.png is not None and importlib.util.find_spec("matplotlib") is None:
        raise ImportError('--png needs matplotlib: pip install "nnterp-core[plot]"')
    values = options.values if options.values == "all" else options.values.split(",")

    progress = logging.getLogger(__package__)
    if not options.quiet:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        progress.addHandler(handler)
        progress.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            from ._compare import compare

            report = compare(
                a,
                b,
                prompts,
                values,
                steps=options.steps,
                together=options.together,
                seed=options.seed,
                yardstick=not options.no_yardstick,
            )
    finally:
        if not options.quiet:
            progress.removeHandler(handler)
    report.write(json=options.json, html=options.html, png=options.png)
    return report


def sides(options: argparse.Namespace) -> tuple[Spec, Spec]:
    """The two models that the command line names.

    Raises:
        ValueError: not two are named, or one is misspelt.
    """
    engines = options.engines.split(",")
    if len(engines) != 2:
        raise ValueError(f"--engines takes two, as in hf,vllm or hf,hf; not {options.engines!r}")
    given = (options.a or engines[0], options.b or engines[1])
    first, second = (side(text, options.checkpoint, options.dtype) for text in given)
    return first, second


def side(text: str, checkpoint: str, dtype: str | None = None) -> Spec:
    """``"vllm:dtype=bfloat16,max_model_len=512"`` as a model to load.

    Args:
        text: the engine, and options after a colon.
        checkpoint: what is loaded, unless ``checkpoint=`` is among the options.
        dtype: likewise for ``dtype=``.

    Raises:
        ValueError: an option is not of the form ``key=value``, or no engine is named.
    """
    engine, _, rest = text.partition(":")
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if engine == "vllm":
        # A bar for every load tells nobody anything here.
        options["use_tqdm_on_load"] = False
    for part in rest.split(",") if rest else ():
        key, equals, setting = part.partition("=")
        if not equals or not key:
            raise ValueError(f"{part!r} in {text!r} is not of the form key=value")
        options[key] = _literal(setting)
    if not engine:
        raise ValueError(f"{text!r} names no engine")
    return Spec(engine, str(options.pop("checkpoint", checkpoint)), options)


def _literal(setting: str) -> Any:
    plain = {"true": True, "false": False, "none": None}
    if setting.lower() in plain:
        return plain[setting.lower()]
    try:
        return ast.literal_eval(setting)
    except (ValueError, SyntaxError):
        return setting


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a file.

    Args:
        path: ``.json`` with a list, ``.jsonl`` with an entry a line, else a text a line.

    Raises:
        ValueError: there is none.
    """
    text = path.read_text()
    lines = [line for line in text.splitlines() if line.strip()]
    prompts: list[Any]
    if path.suffix == ".json":
        prompts = json.loads(text)
    elif path.suffix == ".jsonl":
        prompts = [json.loads(line) for line in lines]
    else:
        prompts = lines
    if not isinstance(prompts, list) or not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


if multiprocessing.parent_process() is not None:
    # vLLM's processes import the command line's module too.
    hush()

if __name__ == "__main__":
    sys.exit(main())
