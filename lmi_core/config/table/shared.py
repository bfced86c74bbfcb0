"""What every engine's models have in common: keys that our server or our engine's loop takes."""

from collections.abc import Mapping
from dataclasses import replace

from lmi_core.config.table.option import Action, Option, Outcome

FRONT = frozenset(
    {
        "engine",
        "cpu.maxWorkers",
        "gpu.maxWorkers",
        "gpu.minWorkers",
        "gpu.required_memory_mb",
        "gpu.reserved_memory_mb",
        "load_on_devices",
        "log_request_metric",
        "maxWorkers",
        "max_idle_time",
        "metric_dimension",
        "metrics_aggregation",
        "option.async_mode",
        "option.bedrock_compat",
        "option.chat_template",
        "option.chat_template_content_format",
        "option.data_type",
        "option.decoding_strategy",
        "option.enable_auto_tool_choice",
        "option.enable_reasoning",
        "option.enable_stateful_sessions",
        "option.enable_streaming",
        "option.enable_venv",
        "option.entryPoint",
        "option.env",
        "option.handler",
        "option.lmi_compat",
        "option.max_input_tokens",
        "option.max_output_size",
        "option.modelName",
        "option.model_dir",
        "option.model_loading_timeout",
        "option.output_formatter",
        "option.override_generation_config",
        "option.parallel_loading",
        "option.predict_timeout",
        "option.pythonExecutable",
        "option.reasoning_parser",
        "option.s3url",
        "option.sessions_expiration",
        "option.sessions_path",
        "option.sessions_s3url",
        "option.stop_sequence",
        "option.tgi_compat",
        "option.tokenizer_config_path",
        "option.tool_call_parser",
        "option.watermark_delta",
        "option.watermark_gamma",
        "required_memory_mb",
        "reserved_memory_mb",
        "retry_threshold",
        "translatorFactory",
    }
)
"""Keys that the server's routes take, whatever computes the tokens."""


def shared(option: Option) -> Action:
    """The lmi engine's action, for another backend. Its test is of the lmi engine, so that
    what is honoured there is mapped here."""
    return _unproven(option.actions["lmi"])


def front_actions(option: Option, backends: tuple[str, ...]) -> Mapping[str, Action]:
    """The actions of ``backends`` for a key of the server's routes; none for other keys."""
    if option.key not in FRONT:
        return {}
    return dict.fromkeys(backends, shared(option))


def _unproven(action: Action) -> Action:
    by_value = action.by_value and {v: _unproven(each) for v, each in action.by_value.items()}
    if action.outcome is not Outcome.HONOURED:
        return replace(action, by_value=by_value)
    text = action.text
    if not (text or action.setting or action.capability):
        text = "as with the lmi engine"
    return replace(action, outcome=Outcome.MAPPED, test=None, text=text, by_value=by_value)
