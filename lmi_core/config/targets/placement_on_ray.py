"""How a model is placed on the GPUs of a Ray cluster's nodes, whose sizes aren't known here."""

from __future__ import annotations

from lmi_core.config.targets.placed_subject import DEGREE, ON, STAGES, Subject
from lmi_core.config.targets.placement_on_cpu import copies_of, most_copies_of
from lmi_core.settings.placement import Placement

_NAMING = ("load_on_devices", "option.device_id", "option.device_map")


def on_gpus_of_nodes(subject: Subject) -> Placement:
    """Decide it for our engine: as many copies as are asked for, each with its GPUs on one node."""
    values = subject.values
    for key in _NAMING:
        if key in values.known:
            subject.refuse(
                key,
                f"{key}={values.get(key)} names devices of one machine, and with {ON}=ray Ray "
                "chooses among those of its nodes: leave it out",
            )
    degree, stages = values.get(DEGREE), values.get(STAGES)
    if degree is not None and (not isinstance(degree, int) or degree < 1):
        subject.refuse(
            DEGREE,
            f"{DEGREE}={degree} goes by the GPUs of this machine, and with {ON}=ray a copy is on "
            "another: write how many it has",
        )
        degree = 1
    if isinstance(stages, int) and stages > 1:
        subject.refuse(
            STAGES,
            f"{STAGES}={stages}, and {subject.title} has no pipelines: leave it out, or serve with "
            "option.rolling_batch=vllm, without Ray's copies",
        )
    num_copies, threads = copies_of(subject, "cuda"), values.get("option.num_threads")
    return Placement(
        device="cuda",
        tensor_parallel_degree=degree if isinstance(degree, int) else 1,
        num_copies=num_copies,
        most_copies=most_copies_of(subject, "cuda", num_copies),
        num_cores=threads if isinstance(threads, int) else 0,
        on="ray",
    )
