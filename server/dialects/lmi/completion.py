"""OpenAI's completions on LMI's routes: bodies with ``prompt``, which came with LMI 0.33.

As with chats there, streams are lines unless the client accepts events.
"""

from __future__ import annotations

from functools import partial

from lmi_core.errors import UserError
from lmi_server.dialects.base import Call, ParsedCall
from lmi_server.dialects.lmi.adapters import adapter_of_call
from lmi_server.dialects.lmi.output import error_body
from lmi_server.dialects.lmi.schema import LmiBody
from lmi_server.dialects.openai.completion_output import (
    Echo,
    completion_renderer,
)
from lmi_server.dialects.openai.completion_schema import (
    completion_requests,
    completion_sampling_params,
    decode_completion,
    infill_of,
    prompts_of,
    with_suffix,
)
from lmi_server.dialects.openai.schema import WITHIN
from lmi_server.dialects.unknown_fields import report_fields
from lmi_server.models.stand_in import DecodingModel


def parse_completion(model: DecodingModel, call: Call, given: LmiBody) -> ParsedCall:
    """``given``: the call's body, decoded as far as all of LMI's are. Raises UserError naming the
    field at fault."""
    body = decode_completion(call.body)
    adapter = adapter_of_call(model, given.adapters, call, body.model)
    prompts = prompts_of(body)
    whole = with_suffix(prompts, body.suffix, partial(infill_of, model))
    params = completion_sampling_params(body)
    answer = body.answer(
        id=f"cmpl-{call.request_id}",
        model=adapter or model.options.model_name,
        error=error_body,
        num_choices=body.num_choices,
        num_prompts=len(prompts),
        logprobs=body.logprobs is not None,
        compact=False,
        as_events="text/event-stream" in call.headers.get("accept", ""),
    )
    echo = None
    if body.echo:
        texts = tuple(prompt for prompt in prompts if isinstance(prompt, str))
        if len(texts) < len(prompts):
            message = "echo of token ids is for /v1/completions; send the prompt as text here"
            raise UserError(message, field="echo")
        echo = Echo(prompts=texts, without_output=body.scores_only)
    renderer = completion_renderer(
        answer, echo, streams=bool(body.stream), num_candidates=body.num_candidates
    )
    requests = completion_requests(call.request_id, body, whole, params, adapter)
    renderer.headers = report_fields(call, (*body.__struct_fields__, "adapters"), WITHIN)
    return ParsedCall(
        requests=requests,
        renderer=renderer,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
