"""Rules of the text-generation-inference launcher that tie flags together.

Source: TGI's launcher/src/main.rs.
"""

from __future__ import annotations

from lmi_core.config.checks import Subject
from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.config.targets.host import Host

_LEGACY = ("--max-input-length", "MAX_INPUT_LENGTH")
_MODERN = ("--max-input-tokens", "MAX_INPUT_TOKENS")


def check_tgi(subject: Subject, host: Host) -> None:
    """Note launcher flags that exclude each other; flags that weren't given don't count."""
    _input_length(subject)
    _budgets(subject)
    _shards(subject, host)
    _dtype(subject)


def check_tgi_server(server: Values, problems: Problems) -> None:
    """Note faults in the launcher's flags for the server as a whole."""
    if server.get("option.validation_workers") == 0:
        key = "option.validation_workers"
        problems.error(server.where(key), "--validation-workers must be at least 1", key)
    if server.get("option.ngrok") is not True:
        return
    for name in ("ngrok_authtoken", "ngrok_edge"):
        if server.get(f"option.{name}") is None:
            message = f"--ngrok needs --{name.replace('_', '-')}"
            problems.error(server.where("option.ngrok"), message, "option.ngrok")


def _input_length(subject: Subject) -> None:
    value = subject.values.known.get("option.max_input_tokens")
    if value is None:
        return
    places = {value.setting.where, *(s.where for s in value.overridden)}
    if places & set(_LEGACY) and places & set(_MODERN):
        subject.error(
            "option.max_input_tokens",
            "--max-input-tokens and its old name --max-input-length are both set; keep the first",
        )


def _budgets(subject: Subject) -> None:
    """Each limit must fit into the next larger one."""
    prompt = "option.max_input_tokens"
    total = "option.max_total_tokens"
    prefill = "option.max_rolling_batch_prefill_tokens"
    batch = "option.max_batch_total_tokens"
    for smaller, larger, strict in (
        (prompt, total, True),
        (total, batch, False),
        (prefill, batch, False),
    ):
        low, high = subject.values.get(smaller), subject.values.get(larger)
        if not isinstance(low, int) or not isinstance(high, int):
            continue
        if low > high or (strict and low == high):
            relation = "below" if strict else "at most"
            subject.error(
                smaller,
                f"{_flag(subject, smaller)}={low} must be {relation} "
                f"{_flag(subject, larger)}={high}",
            )


def _flag(subject: Subject, key: str) -> str:
    flag = subject.values.known[key].option.flag
    return flag.name if flag else key


def _shards(subject: Subject, host: Host) -> None:
    sharded = subject.option("sharded")
    num_shard = subject.option("tensor_parallel_degree")
    if isinstance(num_shard, int) and num_shard < 1:
        subject.error("option.tensor_parallel_degree", "--num-shard must be at least 1")
    if sharded == "true":
        if isinstance(num_shard, int) and num_shard <= 1:
            subject.error("option.sharded", f"--sharded true needs --num-shard above {num_shard}")
        elif num_shard is None and host.num_devices <= 1:
            subject.error(
                "option.sharded",
                f"--sharded true needs at least 2 devices, found {host.num_devices}",
            )
    quantize = subject.option("quantize")
    if quantize == "exl2" and isinstance(num_shard, int) and num_shard > 1:
        subject.error("option.quantize", "--quantize exl2 can't be sharded; write --num-shard 1")


def _dtype(subject: Subject) -> None:
    quantize, dtype = subject.option("quantize"), subject.option("dtype")
    if dtype in (None, "auto") or quantize is None or str(quantize).startswith("bitsandbytes"):
        return
    subject.error(
        "option.dtype",
        f"--dtype {dtype} and --quantize {quantize} both decide the weights' type; keep one",
    )
