"""DeepSpeed keys (removed from LMI in 0.28); the lmi engine stands in for them."""

from lmi_core.config.table.option import Option, honoured, mapped, no_effect, refused
from lmi_core.config.table.value_type import Bool, Float, Int, Text

_SYSTEMS = ("deepspeed",)
_KERNELS = no_effect("chooses a DeepSpeed kernel; the lmi engine has its own")

OPTIONS = (
    Option(
        key="option.max_tokens",
        type=Int(1),
        doc="Most tokens of one sequence, prompt and answer together.",
        systems=_SYSTEMS,
        default=1024,
        actions={
            "lmi": honoured(
                "max_model_len",
                test="tests/config/test_honoured_limits.py::test_length_of_a_sequence",
            ),
            "vllm": mapped("max_model_len"),
        },
    ),
    Option(
        key="option.enable_cuda_graph",
        type=Bool(),
        doc="Capture the forward pass as a CUDA graph.",
        systems=_SYSTEMS,
        default=False,
        actions={"lmi": no_effect("the lmi engine replays its own recorded graph")},
    ),
    Option(
        key="option.triangular_masking",
        type=Bool(),
        doc="Causal attention mask.",
        systems=_SYSTEMS,
        default=True,
        actions={
            "lmi": no_effect(
                "decoder models are always causal",
                by_value={False: refused("decoder models are always causal; remove the key")},
            )
        },
    ),
    Option(
        key="option.return_tuple",
        type=Bool(),
        doc="Layers return tuples.",
        systems=_SYSTEMS,
        default=True,
        actions={"lmi": _KERNELS},
    ),
    Option(
        key="option.training_mp_size",
        type=Int(1),
        doc="Tensor parallel degree the checkpoint was trained with.",
        systems=_SYSTEMS,
        default=1,
        actions={
            "lmi": refused("give a checkpoint in safetensors, as saved by Transformers", idle=(1,))
        },
    ),
    Option(
        key="option.checkpoint",
        type=Text("path"),
        doc="DeepSpeed checkpoint file, relative to the model.",
        systems=_SYSTEMS,
        actions={"lmi": refused("give a checkpoint in safetensors, as saved by Transformers")},
    ),
    Option(
        key="option.smoothquant_alpha",
        type=Float(0, 1),
        doc="Balance between activations and weights in SmoothQuant.",
        systems=("deepspeed", "trtllm"),
        defaults={"trtllm": 0.8},
        actions={
            "lmi": honoured(
                "smoothquant_alpha",
                "0.8 where nothing is written",
                test="tests/config/test_smoothquant.py::test_alpha_and_text_change_what_is_rounded",
            ),
            "trtllm": no_effect("TensorRT-LLM quantises nothing at load"),
        },
    ),
    Option(
        key="option.save_mp_checkpoint_path",
        type=Text("path"),
        doc="Where to save sharded weights.",
        systems=("deepspeed", "neuronx"),
        actions={
            "lmi": no_effect("ranks cut the checkpoint while they load it"),
            "neuron": no_effect("vLLM Neuron loads and shards checkpoints itself"),
        },
    ),
    Option(
        key="option.deepspeed_config_path",
        type=Text("path"),
        doc="JSON that replaces the generated DeepSpeed configuration.",
        systems=_SYSTEMS,
        actions={"lmi": refused("write its settings as options; DeepSpeed doesn't run here")},
    ),
)
