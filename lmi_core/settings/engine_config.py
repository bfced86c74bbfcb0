"""The frozen configuration that the lmi engine takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lmi_core.errors import UserError
from lmi_core.settings.field_checks import check_fields
from lmi_core.settings.job import Job
from lmi_core.settings.lora_config import LoraConfig
from lmi_core.settings.speculation_config import SpeculationConfig

DType = Literal["auto", "bf16", "fp32"]
Activations = Literal["auto", "int8", "bf16"]
KvDType = Literal["auto", "bf16", "fp32", "int8", "fp8_e4m3fn", "fp8_e5m2"]
Task = Literal["auto", "generate", "embed", "rerank"]
Device = Literal["cpu", "cuda", "torch-cpu"]
StatesOf = Literal["embedding", "last_layer"]
Quantization = Literal[
    "int8", "int4", "fp8", "awq", "gptq", "compressed-tensors", "exl2", "bitsandbytes",
    "bitsandbytes-nf4", "bitsandbytes-fp4", "eetq", "smoothquant",
]  # fmt: skip

BLOCK_MULTIPLE = 16
"""Of tokens in a KV block: what attention kernels read at once."""
_CPU_QUANTIZE = ("bitsandbytes-nf4", "bitsandbytes-fp4")
_LEAST = {
    "max_model_len": 1,
    "max_queue_size": 0,
    "max_queue_s": 0,
    "num_models": 1,
    "waiting_steps": 0,
    "max_batch_total_tokens": 1,
    "repack_cache_bytes": 0,
    "prefix_cache_bytes": 0,
    "seed": 0,
    "max_logprobs": 0,
    "tensor_parallel_degree": 1,
}
"""Bounds that hold on every device; others follow from the model and the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the lmi engine is told; None or "auto" means that it decides from the model
    and the machine, and reports what it chose in ``EngineInfo``. UserError for a value of another
    type than its field's, or none of its words.
    """

    model: Path
    """Directory with config.json, *.safetensors and tokenizer.json."""
    served_model_name: str = "model"
    task: Task = "auto"
    """What requests get: tokens, an embedding, or a pair's score; auto: what the checkpoint's
    architecture and files say it is for."""
    normalize: bool = True
    """Whether embeddings have length 1, where a request doesn't say."""
    device: Device = "cpu"
    """cpu: this machine's cores; cuda: the first GPU; torch-cpu: as cuda, without one (tests)."""
    dtype: DType = "auto"
    """Weights and activations; auto: bf16 where the checkpoint is 16 bit, else fp32."""
    quantize: Quantization | None = None
    """What the matrices become at load; None: as ``dtype``. int8 has a scale per output and
    rounds activations to int8 too, row by row, but a row's outliers to 16 bits; int4 has one per
    output and 128 inputs, and rounds activations so on the CPU only; fp8 is as int8, without
    outliers, on torch devices, and rounds no activations on the CPU. bitsandbytes (LLM.int8),
    bitsandbytes-nf4, -fp4 and eetq give those libraries' codes and scales: nf4 and fp4, on the CPU
    only, round activations as int4, eetq none, LLM.int8 those below 6. smoothquant has int8 weights
    with a scale per output and rounds rows to int8, whose inputs a calibration smoothed. The output
    head is int8 in all. An fp8 checkpoint stays fp8, on the CPU where inputs are a multiple of 128.
    A checkpoint in integers or of bitsandbytes stays as it is; awq, gptq, compressed-tensors and
    bitsandbytes say which it is expected to be."""
    smoothquant_alpha: float = 0.8
    """How much of channels' sizes smoothquant moves to weights: 0, nothing; 1, all of it."""
    calibration_file: Path | None = None
    """The text that smoothquant measures activations on; None: a short one of many kinds."""
    activations: Activations = "auto"
    """What quantised weights are multiplied with; auto: rows rounded as above, or to int8 alone
    where the checkpoint's scheme says so; int8: always so; bf16, on the CPU only: rows as they are,
    in sums of fp32, which takes two to four times as long."""
    lora: LoraConfig | None = None
    """Adapters; None: there are none, and none can be loaded."""
    kv_dtype: KvDType = "auto"
    """KV cache; auto: as ``dtype``; int8: with a scale per token and head; fp8, on torch devices:
    with the checkpoint's scales of each layer, or none."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None: the model's own limit."""
    rope_scaling: Literal["linear", "dynamic"] | dict[str, Any] | None = None
    rope_factor: float | None = None
    rope_theta: float | None = None
    """Rotary settings instead of the checkpoint's own; a factor alone is linear, and an object is
    what config.json has (``rope_type``, ``factor`` and their like)."""
    max_num_seqs: int = 32
    """Sequences that run at once (max_rolling_batch_size)."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step, prefill chunks and decode rows together; None: 2048 on CPU, or
    ``max_num_seqs`` where that is more."""
    max_queue_size: int = 1000
    """Requests waiting beyond those running before new ones are refused (job_queue_size)."""
    max_queue_s: float | None = None
    """Seconds that a request may wait for its first step before it is refused after all; None:
    any number."""
    scheduling_policy: Literal["fcfs", "priority"] = "priority"
    """fcfs: requests run in the order of arrival, and one that says a priority is refused;
    priority: those with less of it run first, at the cost of others' rows and memory."""
    block_size: int = 32
    """Tokens per KV block; a multiple of 16."""
    kv_cache_bytes: int | None = None
    """Size of the block pool; None: room for max_num_seqs sequences of min(max_model_len, 4096)
    tokens, at most a quarter of the memory that the cgroup allows."""
    max_batch_total_tokens: int | None = None
    """Tokens of all running sequences together, rounded up to blocks; None: as many as fit into the
    pool, which else has room for no more than these."""
    num_models: int = 1
    """Models that are loaded together: the quarter is divided by it."""
    enable_prefix_caching: bool = True
    prefix_key: bytes | None = field(default=None, repr=False)
    """16 secret bytes that key the hashes of prefixes; None: new ones. Engines with the same can
    tell each other of prefixes."""
    guaranteed_no_evict: bool = False
    """Admit a sequence only when its whole possible length fits, so that none is preempted."""
    speculation: SpeculationConfig | None = None
    """Draft tokens; None: every step brings a sequence one token."""
    contrastive_states: StatesOf = "embedding"
    """Which hidden states contrastive search compares: what the first layer reads, as LMI does, or
    what the last one gives, as Transformers did."""
    gives_states: bool = False
    """Hidden states are wanted of any step: on GPUs, Python launches all of them."""
    waiting_steps: int = 0
    """Steps after an admission in which nobody else is admitted, as long as anything runs."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, steps and KV cache."""
    deterministic: bool = False
    """On torch devices: equal bits for equal requests, whatever else runs; kernels are slower for
    it. The CPU engine is so anyway."""
    flash_attention: bool = True
    """On a GPU: flash-attn does prefills where it is installed and measured faster."""
    enforce_eager: bool = False
    """Run a GPU's decode steps kernel by kernel instead of replaying captured graphs."""
    num_threads: int | None = None
    """Worker threads, of each rank; None: physical cores within affinity mask and cgroup quota,
    divided among the ranks."""
    cpu_binding: Literal["auto", "nodes", "cores", "none"] = "auto"
    """What each of several ranks or copies is bound to: cores of its own, or their NUMA node; auto:
    nodes, where there are several (CPU engine)."""
    bound_cpus: tuple[tuple[int, ...], ...] | None = None
    """Each rank's logical cores, empty: any; None: as ``cpu_binding`` says."""
    weight_nodes: tuple[int, ...] = ()
    """The NUMA node of each rank that maps packed weights of that node's own, beside other copies;
    0, and empty: the first ones."""
    job: Job | None = None
    """Whose processes the ranks run in, this one first; None: rank 0 starts the others."""
    tensor_parallel_degree: int = 1
    """Ranks: processes that compute the model together, each with a slice of the weights and with
    the KV cache of its heads; on the CPU, or each on a GPU."""
    tp_invariant: bool = False
    """Whether sums that ranks share go over a fixed number of slices, so that answers have the same
    bits at every degree (CPU engine)."""
    repack_cache_dir: str = "auto"
    """Where packed weights are kept for the next start (CPU engine, checkpoints from 64 MiB); auto:
    lmi/packed in $XDG_CACHE_HOME or ~/.cache; none: nowhere."""
    repack_cache_bytes: int = 32 << 30
    """Most that the directory may hold; what wasn't used for longest goes first."""
    packs_behind: bool = True
    """Whether bf16 matrices may still be packed while the first requests run, at less speed, from
    the checkpoint's rows (CPU engine, checkpoints from 64 MiB)."""
    prefix_cache_dir: Path | None = None
    """Where KV blocks are kept beyond memory and restarts (CPU engine); None: nowhere."""
    prefix_cache_bytes: int = 16 << 30
    """Most that the blocks of all models in the directory may take; what wasn't used for longest
    goes first."""
    overlap: bool = True
    """Deliver step n while step n+1 runs; False: the plain loop. Both give the same tokens."""
    seed: int = 0
    """Base of the seeds of requests that give none."""
    instruction_set: str = ""
    """Kernel level; empty: the best this CPU runs."""
    max_logprobs: int = 20
    """Largest top-n of log-probabilities that a request may ask for; the whole vocabulary at
    most."""

    def __post_init__(self) -> None:
        if isinstance(self.model, str):
            object.__setattr__(self, "model", Path(self.model))
        if isinstance(self.prefix_cache_dir, str):
            object.__setattr__(self, "prefix_cache_dir", Path(self.prefix_cache_dir))
        if isinstance(self.calibration_file, str):
            object.__setattr__(self, "calibration_file", Path(self.calibration_file))
        check_fields(self)
        if not 0 <= self.smoothquant_alpha <= 1:
            raise UserError(
                f"smoothquant_alpha is {self.smoothquant_alpha}, but must be from 0 to 1",
                field="smoothquant_alpha",
            )
        if self.prefix_cache_dir is not None and self.device != "cpu":
            raise UserError(
                f"prefix_cache_dir needs device=cpu, not {self.device}: leave it out",
                field="prefix_cache_dir",
            )
        if self.activations == "bf16" and self.device != "cpu":
            raise UserError(
                f"activations=bf16 needs device=cpu, not {self.device}, where int8 weights have no "
                "kernel for it, and int4 ones have nothing else: leave it out",
                field="activations",
            )
        if self.quantize in _CPU_QUANTIZE and self.device != "cpu":
            raise UserError(
                f"quantize={self.quantize} needs device=cpu, not {self.device}, which has no such "
                "kernels: write int4, which takes as little memory",
                field="quantize",
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}, but must be at least {least}", field=name)


def is_too_long(max_model_len: int | None, num_positions: int | None) -> bool:
    """Whether more tokens are asked for than a model has positions; None: nothing is, or nobody
    knows."""
    if max_model_len is None or num_positions is None:
        return False
    return max_model_len > num_positions


def check_max_model_len(max_model_len: int | None, num_positions: int | None) -> None:
    """Raise UserError if it is too long."""
    if is_too_long(max_model_len, num_positions):
        raise UserError(
            f"max_model_len={max_model_len} is longer than the model's {num_positions} positions",
            field="max_model_len",
        )
