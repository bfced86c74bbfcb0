"""Keys of the scheduler rolling batch (padded execution bounded by max-sparsity)."""

from lmi_core.config.table.option import Option, honoured, no_effect, refused
from lmi_core.config.table.value_type import Bool, Choice, Float, Int, Text

_SYSTEMS = ("scheduler",)
_PADDED = "option.force_padded=true has padded ones"

OPTIONS = (
    Option(
        key="option.decoding_strategy",
        type=Choice(("greedy", "sample", "contrastive")),
        doc="Decoding of requests that don't choose one.",
        systems=_SYSTEMS,
        default="greedy",
        actions={
            "lmi": honoured(
                None,
                "of requests on LMI's routes that don't say decoding_strategy or do_sample",
                test="tests/cli/test_options.py::test_defaults_of_requests_and_the_chat_template",
                by_value={
                    "contrastive": honoured(
                        "gives_states",
                        "of the same requests; unlike LMI, with the top_k and penalty_alpha that "
                        "they say",
                        test="tests/server/dialects/lmi/test_strategies.py::test_contrastive_search",
                        capability="request.contrastive",
                        convert={"contrastive": True},
                    )
                },
            ),
        },
    ),
    Option(
        key="option.contrastive_states",
        type=Choice(("embedding", "last_layer")),
        doc="Hidden states that contrastive search compares: of tokens alone, as LMI does, or of "
        "tokens behind their texts, as in the method's paper.",
        systems=("lmi",),
        default="embedding",
        actions={
            "lmi": honoured(
                "contrastive_states",
                test="tests/config/test_honoured_strategies.py"
                "::test_states_that_contrastive_search_compares",
            ),
        },
    ),
    Option(
        key="option.max_sparsity",
        type=Float(0, 1),
        doc="Largest share of padding in a split of the batch.",
        systems=_SYSTEMS,
        default=0.33,
        actions={
            "lmi": no_effect(f"paged batches have no padding; {_PADDED}"),
        },
    ),
    Option(
        key="option.max_splits",
        type=Int(1),
        doc="Most splits of the batch, each with its own forward call.",
        systems=_SYSTEMS,
        default=3,
        actions={
            "lmi": no_effect(f"paged batches are never split; {_PADDED}"),
        },
    ),
    Option(
        key="option.force_padded",
        type=Bool(),
        doc="Compute a model that the lmi engine knows by Transformers, in padded batches.",
        systems=(*_SYSTEMS, "lmi"),
        default=False,
        actions={"lmi": no_effect("paged batches have no padding")},
    ),
    Option(
        key="option.multi_gpu",
        type=Text("lmi_dist_sharding"),
        doc="Sharding of gpt-neox in the scheduler.",
        systems=_SYSTEMS,
        deprecated="since 0.25: use option.tensor_parallel_degree",
        actions={"lmi": refused("use option.tensor_parallel_degree")},
    ),
)
