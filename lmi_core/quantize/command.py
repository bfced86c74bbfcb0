"""``lmi quantize``: reads a model directory and writes another one."""

from __future__ import annotations

import argparse
import glob
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from lmi_core.calibration.layer_runs import LayerRuns
from lmi_core.errors import UserError
from lmi_core.files import read_json_object
from lmi_core.local_model import open_local_model
from lmi_core.models.expert_tensors import expert_mlps, expert_shapes, router_modules
from lmi_core.models.found_model import FoundModel, find_model
from lmi_core.models.spec import DecoderSpec, latent_linears, layer_linears
from lmi_core.progress import TerminalProgress
from lmi_core.quantize.expert_slices import with_own_tensors
from lmi_core.quantize.experts import objection
from lmi_core.quantize.formats import FORMATS, NEEDING_TEXT, Format, format_of, has_groups
from lmi_core.quantize.gguf.mixes import MIXES
from lmi_core.quantize.quantizer import Quantizer
from lmi_core.quantize.stored import Output, Shards, Stored
from lmi_core.quantize.usual_matrices import with_usual_matrices
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.calibration_text import read_text, sequences_of
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.units import megabytes
from lmi_core.weights.float_tensors import FLOAT_DTYPES, read_array
from lmi_core.weights.gguf.names import PATTERN
from lmi_core.weights.hf_config import QUANTIZATION_KEY

ALL_FORMATS = (*FORMATS, *MIXES)
_GROUP_SIZES = (128, 64, 32)
_PER_WORD = 8
_COPIED = (".json", ".txt", ".model", ".jinja")
_NOT_COPIED = ("config.json", "quantize_config.json", "quant_config.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model's directory, or its name on the hub")
    parser.add_argument(
        "out",
        type=Path,
        help="the directory to write, or for GGUF a file's name; it must not exist",
    )
    parser.add_argument("--format", required=True, choices=ALL_FORMATS)
    parser.add_argument(
        "--text",
        type=Path,
        help="a file of text like what the model will read; gptq and awq need it, the formats of "
        "compressed-tensors in integers get GPTQ's codes with it, and in GGUF weights count as "
        "much as what they are multiplied with",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=_GROUP_SIZES,
        help="inputs that share a scale; default: 128, or the most that divides all layers' inputs",
    )
    parser.add_argument(
        "--act-order",
        action="store_true",
        help="with gptq: round the inputs that weigh most first; less loss, but groups that aren't "
        "of neighbours, which servers read more slowly, or widen",
    )
    parser.add_argument(
        "--num-sequences",
        type=int,
        default=64,
        help="of 512 tokens, from the text's beginning (default: 64)",
    )


def quantize(args: argparse.Namespace, flags: Sequence[str], default_model: Path) -> int:
    """Quantise ``args.model``, given with ``flags`` of lmi serve. Raises UserError, ModelError."""
    _check_arguments(args)
    config = open_local_model([args.model, *flags], default_model).config
    config = replace(config, quantize=None, lora=None)
    found = find_model(config)
    _check_model(found, args.format)
    found = with_usual_matrices(with_own_tensors(found, is_gguf=args.format in MIXES))
    group_size = 0 if args.format in MIXES else _group_size(args.format, args.group_size, found)
    out: Path = args.out
    _say_what_was_left(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent) as temporary:
            partial = Path(temporary, out.name)
            partial.mkdir()
            num_bytes = _write(args, config, found, group_size, partial)
            made = partial / out.name
            (made if made.is_file() else partial).rename(out)
    except OSError as error:
        raise UserError(f"{out} can't be written: {error.strerror}", field="out") from None
    stored = found.checkpoint.stored_bytes
    print(f"{args.out}: {megabytes(num_bytes)} of {megabytes(stored)}, in {args.format}")
    return 0


def _say_what_was_left(out: Path) -> None:
    """By a run that was killed, which can't remove anything, on stderr."""
    for path in sorted(out.parent.glob(f"{glob.escape(out.name)}.partial-*")):
        if (path / out.name).is_dir():
            print(
                f"{path} was left by a run that was killed, or is being written by one: remove it "
                "if none goes on",
                file=sys.stderr,
            )


def _check_arguments(args: argparse.Namespace) -> None:
    if args.out.exists():
        raise UserError(f"{args.out} exists already: name another directory", field="out")
    if args.text is None and args.format in NEEDING_TEXT:
        raise UserError(
            f"--format {args.format} needs --text FILE, on which it measures what layers read: a "
            "few hundred kilobytes like what the model will be asked",
            field="text",
        )
    if args.group_size is not None and not has_groups(args.format):
        raise UserError(
            f"--group-size {args.group_size} has no meaning in --format {args.format}, which "
            "has no groups, or its own: leave it out",
            field="group_size",
        )
    if args.act_order and args.format != "gptq":
        raise UserError(
            f"--act-order has no meaning in --format {args.format}: leave it out, or write "
            "--format gptq",
            field="act_order",
        )
    if args.num_sequences < 1:
        raise UserError(
            f"--num-sequences is {args.num_sequences}, but must be at least 1",
            field="num_sequences",
        )


def _check_model(found: FoundModel, format: str) -> None:
    spec, checkpoint = found.spec, found.checkpoint
    reason = None
    if checkpoint.gguf_architecture is not None or checkpoint.quantization is not None:
        reason = "it is quantised already: give the checkpoint that it was made of"
    elif (problem := objection(spec, format, is_gguf=format in MIXES)) is not None:
        reason = problem
    elif spec.names.transposed and format not in MIXES:
        reason = f"{spec.architecture} has no linears as these formats know them"
    elif "text_config" in checkpoint.config.values:
        reason = "it has other parts than its language model, which would be lost"
    if reason is not None:
        raise UserError(
            f"{checkpoint.path} can't be written in fewer bits: {reason}", field="model"
        )


def _group_size(name: str, asked: int | None, found: FoundModel) -> int:
    """The groups of a format that has some; UserError for what doesn't fit the layers."""
    shapes = _linear_shapes(found)
    for module, (size, _) in shapes.items():
        if size % _PER_WORD:
            raise UserError(
                f"{module} has {size} outputs; formats in words need multiples of {_PER_WORD}",
                field="model",
            )
    sizes = {num_inputs for _, num_inputs in shapes.values()}
    fitting = [size for size in _GROUP_SIZES if all(inputs % size == 0 for inputs in sizes)]
    if not has_groups(name):
        return 0
    if asked is not None and asked not in fitting:
        fitting = []
    if not fitting:
        counts = ", ".join(map(str, sorted(sizes)))
        tried = asked or _GROUP_SIZES[-1]
        raise UserError(
            f"groups of {tried} don't divide the layers' inputs ({counts}): write another "
            "--group-size, or a format with a scale per output, such as compressed-tensors-w8a16",
            field="group_size",
        )
    return asked or fitting[0]


def _linear_shapes(found: FoundModel) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of what is quantised, by the module's name within its layer."""
    spec = found.spec
    shapes: dict[str, tuple[int, int]] = {}
    for layer_id in range(spec.num_layers):
        for source in layer_linears(spec, layer_id).values():
            shapes |= {module: (size, source.num_inputs) for module, size in source.modules}
    shapes |= latent_linears(spec)
    if spec.experts is not None:
        given = expert_shapes(spec.experts, spec.hidden_size)
        for name in (name for names in expert_mlps(spec.experts) for name in names):
            num_outputs, num_inputs = given[name]
            shapes[name.removesuffix(".weight")] = (num_outputs, num_inputs)
    return shapes


def _write(
    args: argparse.Namespace,
    config: EngineConfig,
    found: FoundModel,
    group_size: int,
    directory: Path,
) -> int:
    """Everything that belongs into ``directory``; returns the bytes of the tensors."""
    spec = found.spec
    tokenizer = Tokenizer.load(config.model, vocab_size=spec.vocab_size)
    runs = LayerRuns(
        found, instruction_set=config.instruction_set, num_threads=config.num_threads or 0
    )
    try:
        pieces = sequences_of(
            read_text(args.text, "--text"),
            tokenizer,
            num_tokens=runs.max_tokens,
            max_sequences=args.num_sequences,
        )
        if args.format in MIXES:
            return _write_gguf(args, found, tokenizer, runs, pieces, directory)
        return _write_safetensors(args, found, group_size, runs, pieces, directory)
    finally:
        runs.close()
        tokenizer.close()


def _write_safetensors(
    args: argparse.Namespace,
    found: FoundModel,
    group_size: int,
    runs: LayerRuns,
    pieces: Sequence[Sequence[int]],
    directory: Path,
) -> int:
    embedding = found.tensors[found.spec.names.embedding]
    format = format_of(
        args.format,
        group_size=group_size,
        dtype=embedding.dtype if embedding.dtype in FLOAT_DTYPES else "F32",
        has_text=args.text is not None,
        is_ordered=args.act_order,
    )
    shards = Shards(directory)
    _add_all(found, format, runs, pieces, shards)
    shards.finish()
    _write_config(found, format.settings(_kept_modules(found.spec)), directory)
    return shards.num_bytes


def _kept_modules(spec: DecoderSpec) -> list[str]:
    """Names of the modules in layers that stay as they are."""
    kept = router_modules(spec)
    if spec.attention.latent is not None:
        (kv_b,) = spec.attention.latent.names.kv_b
        layers = (spec.names.layer.format(layer=i) for i in range(spec.num_layers))
        kept += [prefix + kv_b.removesuffix(".weight") for prefix in layers]
    return kept


def _write_gguf(
    args: argparse.Namespace,
    found: FoundModel,
    tokenizer: Tokenizer,
    runs: LayerRuns,
    pieces: Sequence[Sequence[int]],
    directory: Path,
) -> int:
    from lmi_core.quantize.gguf.output import GgufFormat, GgufOutput

    is_file = args.out.match(PATTERN)
    name = args.out.name if is_file else f"{args.out.name}.gguf"
    path = directory / f"{name}.partial"
    output = GgufOutput(path, found, MIXES[args.format], tokenizer)
    try:
        format = GgufFormat(output.kinds, has_text=args.text is not None)
        _add_all(found, format, runs, pieces, output)
        output.finish()
    finally:
        output.close()
    path.rename(directory / name)
    return output.num_bytes


def _add_all(
    found: FoundModel,
    format: Format,
    runs: LayerRuns,
    pieces: Sequence[Sequence[int]],
    output: Output,
) -> None:
    """The model's tensors, those of layers in ``format``."""
    progress = TerminalProgress(verb="Quantising")
    quantizer = Quantizer(runs, found.tensors, format, runs.embedded(pieces))
    written: set[str] = set()
    total = sum(tensor.num_bytes for tensor in found.tensors.values())
    done = 0
    for layer_id, made in enumerate(quantizer.layers()):
        names = _of_layer(found, layer_id)
        done += sum(found.tensors[name].num_bytes for name in names)
        kept = [name for name in names if name not in made.replaced]
        output.add(made.tensors | {name: _copied(found, name) for name in kept})
        written |= names
        progress.finish()
        progress.say(f"layer {layer_id}: {made.loss:.2e} of what it adds is changed")
        progress("layers", done, total)
    progress.finish()
    for name in sorted(found.tensors.keys() - written):
        output.add({name: _copied(found, name)})


def _of_layer(found: FoundModel, layer_id: int) -> set[str]:
    prefix = found.spec.names.layer.format(layer=layer_id)
    return {name for name in found.tensors if name.startswith(prefix)}


def _copied(found: FoundModel, name: str) -> Stored:
    tensor = found.tensors[name]
    return Stored(tensor.dtype, np.asarray(read_array(tensor)))


def _write_config(found: FoundModel, settings: dict[str, object], directory: Path) -> None:
    """config.json with the quantisation, and what stands beside it."""
    source = found.checkpoint.path
    values = read_json_object(source / "config.json") | {QUANTIZATION_KEY: settings}
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    for path in source.iterdir():
        is_ours = path.name in _NOT_COPIED or path.name.endswith(".index.json")
        if path.suffix in _COPIED and path.is_file() and not is_ours:
            shutil.copyfile(path, directory / path.name)
