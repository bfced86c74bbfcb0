"""Hugging Face Accelerate keys."""

from lmi_core.config.table.option import (
    Action,
    Flag,
    Option,
    honoured,
    mapped,
    needs,
    no_effect,
    refused,
)
from lmi_core.config.table.value_type import Bool, Int, StopList, Text

_SYSTEMS = ("accelerate",)
_NATIVE = {
    "bitsandbytes8": "bitsandbytes",
    "dynamic_int8": "int8",
    "static_int8": "int8",
    "bitsandbytes4": "bitsandbytes-fp4",
}
_INT8 = needs(
    "quant.int8", "leave it out to serve the model in bf16", setting="quantize", convert=_NATIVE
)
_LIBRARY = needs(
    "quant.bitsandbytes",
    "leave it out to serve the model in bf16",
    setting="quantize",
    convert=_NATIVE,
)
_OFF = no_effect("asks for what happens anyway")


_ROWS = "multiplied as option.activations says"
_SMOOTHQUANT = "tests/config/test_smoothquant.py"
_HONOURED = "tests/config/test_honoured.py::test_quantized_weights_are_smaller"


def _checkpoint(method: str) -> Action:
    """The value says how the checkpoint is quantised."""
    return honoured(
        "quantize",
        "the checkpoint is read as it is quantised",
        test="tests/config/test_quantized_checkpoints.py::test_they_are_served",
        capability=f"weights.{method}",
    )


def _as_library(note: str, capability: str = "quant.bitsandbytes") -> Action:
    """The value says which library's codes and scales weights get."""
    return honoured(
        "quantize",
        note,
        test="tests/config/test_honoured.py::test_weights_get_the_librarys_codes",
        capability=capability,
    )


def _kernels(name: str, method: str) -> Action:
    """The value says so too, and what others multiply such weights with."""
    return mapped(
        "quantize",
        "with kernels of our own",
        capability=f"weights.{method}",
        convert={name: method},
    )


QUANTIZE = {
    "int8": honoured("quantize", _ROWS, test=_HONOURED, capability="quant.int8"),
    "bitsandbytes8": _LIBRARY,
    "bitsandbytes": _as_library("LLM.int8: activations below 6 become int8, row by row"),
    "dynamic_int8": mapped(
        "quantize",
        "W8A8: a scale per token and one per output, outliers of a row in 16 bits",
        capability="quant.int8",
        convert=_NATIVE,
    ),
    "static_int8": _INT8,
    "smoothquant": honoured(
        "quantize",
        "W8A8: a scale per token and one per output, of inputs that a calibration smoothed; one "
        "scale for a row is what its scheme says",
        test=f"{_SMOOTHQUANT}::test_every_spelling_smooths",
        capability="quant.smoothquant",
    ),
    "eetq": _as_library("EETQ's int8, activations as they are", "quant.eetq"),
    "int4": honoured("quantize", _ROWS, test=_HONOURED, capability="quant.int4"),
    "bitsandbytes4": _LIBRARY,
    "bitsandbytes-nf4": _as_library(f"on the CPU; scales in fp32, {_ROWS}"),
    "bitsandbytes-fp4": _as_library(f"on the CPU; scales in fp32, {_ROWS}"),
    "fp8": honoured(
        "quantize",
        "on the CPU, which rounds no activations to fp8, of inputs in multiples of 128",
        test="tests/config/test_honoured.py::test_fp8_weights_on_a_torch_device",
        capability="quant.fp8",
    ),
    "awq": _checkpoint("awq"),
    "awq_marlin": _kernels("awq_marlin", "awq"),
    "gptq": _checkpoint("gptq"),
    "gptq_marlin": _kernels("gptq_marlin", "gptq"),
    "compressed-tensors": _checkpoint("compressed-tensors"),
    "exl2": honoured(
        "quantize",
        "the checkpoint is read as it is quantised, and widened",
        test="tests/config/test_quantized_checkpoints.py::test_exl2_is_served",
        capability="weights.exl2",
    ),
    "marlin": _kernels("marlin", "gptq"),
}
"""What the lmi engine does with each value of ``option.quantize``."""

NATIVE_QUANTIZE = ("int8", "int4", "fp8", "smoothquant")
"""The lmi engine's own names, which every system's configuration may use."""

TGI_QUANTIZE = (
    "awq",
    "eetq",
    "exl2",
    "gptq",
    "bitsandbytes",
    "bitsandbytes-nf4",
    "bitsandbytes-fp4",
    "marlin",
    "compressed-tensors",
)
_ACCELERATE = (
    "bitsandbytes4",
    "bitsandbytes8",
    "bitsandbytes",
    "gptq",
    "awq",
    "deepspeedfp",
    *NATIVE_QUANTIZE,
)

_TRTLLM = "TensorRT-LLM would quantise at load, too, after a calibration that isn't needed here"
TRTLLM_QUANTIZE = {
    "awq by TensorRT-LLM": mapped(
        "quantize", _TRTLLM, capability="quant.int4", convert={"awq by TensorRT-LLM": "int4"}
    ),
    "fp8 by TensorRT-LLM": mapped(
        "quantize", _TRTLLM, capability="quant.int8", convert={"fp8 by TensorRT-LLM": "int8"}
    ),
}
"""Values that name a checkpoint's format elsewhere, and there what is made of any checkpoint."""

OPTIONS = (
    Option(
        key="option.quantize",
        type=Text("name of a quantisation"),
        doc="Quantisation of the weights, at load or as found in the checkpoint.",
        systems=(
            "accelerate",
            "lmi_dist",
            "vllm",
            "deepspeed",
            "neuronx",
            "trtllm",
            "tgi",
            "lmi",
        ),
        spellings=("option.quantization",),
        env=("HF_MODEL_QUANTIZE",),
        flag=Flag("--quantize", "QUANTIZE", choices=(*TGI_QUANTIZE, *NATIVE_QUANTIZE)),
        choices={
            "accelerate": _ACCELERATE,
            "scheduler": _ACCELERATE,
            "lmi_dist": (
                "awq",
                "gptq",
                "squeezellm",
                "deepspeedfp",
                "bitsandbytes8",
                "bitsandbytes",
                *NATIVE_QUANTIZE,
            ),
            "neuronx": ("static_int8", "bitsandbytes8", *NATIVE_QUANTIZE),
            "trtllm": ("awq", *NATIVE_QUANTIZE),
            "tgi": (*TGI_QUANTIZE, *NATIVE_QUANTIZE),
            "common": (
                *QUANTIZE,
                "squeezellm",
                "deepspeedfp",
            ),
        },
        actions={
            "lmi": refused(
                "the lmi engine has no such format: leave option.quantize out, or write "
                "bitsandbytes8 or bitsandbytes4",
                by_value={**QUANTIZE, **TRTLLM_QUANTIZE},
            ),
            "vllm": mapped("quantization"),
            "trtllm": refused(
                "TensorRT-LLM quantises nothing at load: leave option.quantize out; a checkpoint "
                "that is quantised is read as it is"
            ),
            "neuron": refused(
                "vLLM Neuron quantises nothing at load: leave option.quantize out; a checkpoint "
                "that is quantised is read as it is"
            ),
        },
    ),
    Option(
        key="option.load_in_4bit",
        type=Bool(),
        doc="Quantise weights to 4 bits at load.",
        systems=_SYSTEMS,
        deprecated="since 0.25",
        replaced_by="option.quantize",
        actions={
            "lmi": mapped(
                "option.quantize",
                convert={True: "bitsandbytes4"},
                by_value={False: _OFF},
            )
        },
    ),
    Option(
        key="option.load_in_8bit",
        type=Bool(),
        doc="Quantise weights to 8 bits at load.",
        systems=("accelerate", "neuronx"),
        default=False,
        deprecated="since 0.25",
        replaced_by="option.quantize",
        actions={
            "lmi": mapped(
                "option.quantize",
                convert={True: "bitsandbytes8"},
                by_value={False: _OFF},
            )
        },
    ),
    Option(
        key="option.device_id",
        type=Int(-1),
        doc="CUDA device of the model; -1 leaves the choice open.",
        systems=_SYSTEMS,
        default=-1,
        actions={
            "lmi": mapped(None, "the GPU that a copy runs on"),
        },
    ),
    Option(
        key="option.device_map",
        type=Text("auto, balanced, balanced_low_0, sequential or a device"),
        doc="Spread of the layers over devices.",
        systems=_SYSTEMS,
        actions={
            "lmi": no_effect("the lmi engine keeps a copy's layers together"),
        },
    ),
    Option(
        key="option.low_cpu_mem_usage",
        type=Bool(),
        doc="Load weights without a second copy in memory.",
        systems=("accelerate", "deepspeed", "neuronx"),
        default=False,
        defaults={"deepspeed": True},
        actions={
            "lmi": no_effect("weights are always mapped from the file"),
            "neuron": no_effect("vLLM Neuron loads checkpoints itself"),
        },
    ),
    Option(
        key="option.disable_flash_attn",
        type=Bool(),
        doc="Don't use Flash Attention 2.",
        systems=("accelerate", "scheduler"),
        default=False,
        defaults={"accelerate": True, "scheduler": True},
        actions={
            "lmi": honoured(
                "flash_attention",
                "false, with option.device=cuda: flash-attn does prefills where it is installed "
                "and measured faster",
                test="tests/config/test_flash_attention.py::test_allowed_and_not",
                convert={True: False, False: True},
            )
        },
    ),
    Option(
        key="option.stop_sequence",
        type=StopList(),
        doc="Texts that end every answer, in pipeline mode.",
        systems=_SYSTEMS,
        actions={
            "lmi": honoured(
                None,
                "ends the answers of LMI's routes",
                test="tests/cli/test_options.py::test_defaults_of_requests_and_the_chat_template",
            ),
        },
    ),
)
