"""Transformers-NeuronX keys (and Optimum Neuron).

On Neuron devices vLLM's plugin for them serves the model, so that keys with an argument of vLLM's
need no column here; ``neuron_config`` is the plugin's own.
"""

from lmi_core.config.table.option import Action, Option, honoured, mapped, no_effect, refused
from lmi_core.config.table.value_type import Bool, Choice, Int, Items, Text, ValueType

_SYSTEMS = ("neuronx",)
_COMPILER = no_effect("chooses how Neuron compiles; the lmi engine isn't compiled per model")
_OWN_COMPILER = no_effect("vLLM Neuron chooses its compiler's options itself")
_OWN_LOADER = no_effect("vLLM Neuron loads and shards checkpoints itself")


def _neuron(
    name: str,
    kind: ValueType,
    doc: str,
    default: object = None,
    native: Action = _COMPILER,
    neuron: Action = _OWN_COMPILER,
) -> Option:
    return Option(
        key=f"option.{name}",
        type=kind,
        doc=doc,
        systems=_SYSTEMS,
        default=default,
        actions={"lmi": native, "neuron": neuron},
    )


OPTIONS = (
    _neuron(
        "n_positions",
        Int(1),
        "Most tokens of one sequence, prompt and answer together.",
        128,
        honoured(
            "max_model_len",
            test="tests/config/test_honoured_limits.py::test_length_of_a_sequence",
        ),
        mapped("max_model_len"),
    ),
    _neuron("unroll", Text("None or a number"), "Layers unrolled in the compiled graph."),
    _neuron("neuron_optimize_level", Int(1, 3), "Compiler optimisation level."),
    _neuron(
        "context_length_estimate",
        Items(Int(1)),
        "Prompt lengths to compile for.",
        neuron=mapped(
            "additional_config.neuron_config.num_batched_tokens_buckets",
            "the longest is max_num_batched_tokens, too",
        ),
    ),
    _neuron(
        "load_split_model",
        Bool(),
        "The weights are split for Neuron already.",
        False,
        neuron=refused("give the checkpoint as Transformers saves it", idle=(False,)),
    ),
    _neuron(
        "compiled_graph_path",
        Text("s3:// prefix or directory"),
        "Compiled graphs to use.",
        neuron=no_effect(
            "vLLM Neuron can't use those of Transformers-NeuronX; NEURON_COMPILED_ARTIFACTS names "
            "its own"
        ),
    ),
    _neuron(
        "group_query_attention",
        Choice(
            ("shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads"),
            exact=True,
        ),
        "Sharding of the KV cache.",
        neuron=_OWN_LOADER,
    ),
    _neuron("enable_mixed_precision_accumulation", Bool(), "Accumulate in fp32.", False),
    _neuron("enable_saturate_infinity", Bool(), "Saturate instead of infinity.", False),
    _neuron(
        "amp",
        Text("dtype"),
        "Set from option.dtype; a written value is overwritten.",
        neuron=no_effect("is what option.dtype says"),
    ),
    _neuron(
        "model_loader",
        Choice(("tnx", "optimum", "vllm")),
        "Library that loads the model.",
        neuron=_OWN_LOADER,
    ),
    _neuron(
        "rolling_batch_strategy",
        Choice(("continuous_batching", "naive_rolling_batch")),
        "Batching of the Neuron handler.",
        neuron=no_effect("vLLM Neuron always batches continuously"),
    ),
    _neuron("fuse_qkv", Bool(), "Fuse the QKV projections.", False),
    _neuron("on_device_embedding", Bool(), "Embed on the device.", False),
    _neuron("collectives_layout", Choice(("BSH", "HSB", "SBH")), "Layout of collectives."),
    _neuron(
        "partition_schema",
        Choice(("legacy", "optimum", "safetensors", "compile_only")),
        "Form in which compiled artefacts are saved.",
        neuron=_OWN_LOADER,
    ),
)
