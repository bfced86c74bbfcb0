"""The layers behind the pooling, taken out of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from lmi_core.errors import ModelError
from lmi_core.models.pooling import PoolingSpec
from lmi_core.models.pooling_head import Dense, PoolingHead, read_dense
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.tensor_reader import TensorReader
from lmi_core.models.weights import answer_matrix
from lmi_core.text.tokenizer import Tokenizer


def load_pooling_head(
    reader: TensorReader, path: Path, spec: DecoderSpec, pooling: PoolingSpec
) -> PoolingHead:
    """What is behind the pooling. Raises ModelError."""
    layers = [
        Dense(
            reader.vector(f"{layer.name}.weight"),
            reader.vector(f"{layer.name}.bias") if layer.bias else None,
            layer.activation,
            reader.vector(layer.norm) if layer.norm else None,
            spec.norm.eps,
        )
        for layer in spec.head_layers
    ]
    layers += [read_dense(directory) for directory in pooling.dense]
    if pooling.answers is not None:
        layers.append(_answer_layer(reader, path, spec, pooling.answers))
    return PoolingHead(pooling, tuple(layers), spec.hidden_size)


def _answer_layer(
    reader: TensorReader, path: Path, spec: DecoderSpec, answers: tuple[str, str]
) -> Dense:
    """What the logit of the second answer is above that of the first."""
    tokenizer = Tokenizer.load(path)
    ids = [tokenizer.token_id(answer) for answer in answers]
    tokenizer.close()
    if None in ids:
        raise ModelError(
            f"{path}/tokenizer.json lacks one of the tokens {answers}, by which pairs are scored",
            field="tokenizer.json",
        )
    no, yes = reader.rows(answer_matrix(spec), [i for i in ids if i is not None])
    return Dense((yes - no)[None], None)
