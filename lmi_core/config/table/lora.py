"""Keys of LoRA adapters, as vLLM and lmi-dist have them."""

from collections.abc import Mapping

from lmi_core.config.table.option import Action, Option, honoured, mapped, no_effect, refused
from lmi_core.config.table.value_type import Bool, Int, Text, ValueType
from lmi_core.settings.lora_config import LARGEST_RANK

_SYSTEMS = ("vllm", "lmi_dist")


def _lora(
    name: str,
    kind: ValueType,
    doc: str,
    native: Action,
    default: object = None,
    *,
    idle: tuple[object, ...] = (),
    defaults: Mapping[str, object] | None = None,
    vllm: Action | None = None,
) -> Option:
    """``idle``: values that ask nothing of a backend without LoRA."""
    return Option(
        key=f"option.{name}",
        type=kind,
        doc=doc,
        systems=_SYSTEMS,
        default=default,
        defaults=defaults or {},
        actions={"lmi": native, "vllm": vllm or mapped(name, capability="lora", idle=idle)},
    )


OPTIONS = (
    _lora(
        "enable_lora",
        Bool(),
        "Serve LoRA adapters.",
        honoured(
            None,
            "requests may name adapters; those in adapters/ are registered at load",
            test="tests/config/test_lora_settings.py::test_adapters_beside_a_model_answer",
            capability="lora",
            by_value={False: no_effect("no adapters are served")},
        ),
        False,
        idle=(False,),
    ),
    _lora(
        "adapters",
        Text("directory"),
        "Directory within the model's that holds adapters.",
        honoured(
            None,
            "adapters in it are registered at load",
            test="tests/config/test_lora_settings.py::test_adapters_may_be_in_another_directory",
            capability="lora",
            idle=("adapters",),
        ),
        "adapters",
        idle=("adapters",),
    ),
    _lora(
        "max_loras",
        Int(1),
        "Adapters in one batch.",
        no_effect("a batch may have all registered adapters"),
        4,
        idle=(4,),
    ),
    _lora(
        "max_lora_rank",
        Int(1, LARGEST_RANK),
        "Largest rank of an adapter.",
        honoured(
            None,
            "adapters of a higher rank are refused",
            test="tests/config/test_lora_settings.py::test_adapters_of_a_higher_rank_are_refused",
            capability="lora",
            idle=(16,),
        ),
        16,
        idle=(16,),
        defaults={"tgi": 128},
    ),
    _lora(
        "lora_extra_vocab_size",
        Int(0),
        "Tokens an adapter may add.",
        no_effect("an adapter that adds tokens is refused when it is loaded"),
        256,
        idle=(0, 256),
        vllm=refused("vLLM takes no adapters that add tokens: leave it out", idle=(0, 256)),
    ),
    _lora(
        "max_cpu_loras",
        Int(1),
        "Adapters kept in host memory.",
        no_effect("all registered adapters stay in memory"),
    ),
    _lora(
        "fully_sharded_loras",
        Bool(),
        "Shard adapters fully.",
        no_effect("ranks cut adapters like the matrices that they add to"),
        False,
        idle=(False,),
    ),
    _lora(
        "long_lora_scaling_factors",
        Text("numbers"),
        "Scaling of long LoRA.",
        refused("the lmi engine has no long LoRA: leave it out"),
        vllm=refused("vLLM has no long LoRA any more: leave it out"),
    ),
)
