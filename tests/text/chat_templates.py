"""Chat templates written for the tests in the formats of model families, and conversations."""

from __future__ import annotations

from typing import Any

# Header tokens per turn; tools described in the first user turn; a date in the system turn.
HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "1 Jan 2025" %}
{%- endif %}
{%- if messages and messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none and messages | length > 0 %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# <|im_start|> turns; tools in the system turn; tool results merged into one user turn; reasoning
# kept only after the last question.
IM_TURNS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# Bracketed instructions; the system text goes into the last question; strict alternation; tools
# only before the last question; ids of calls checked.
BRACKETS = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() if key != "return" %}
                    {%- if value is string %}
                        {{- '"' + key + '": "' + value + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + value | tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("ids of calls have 9 characters") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("no such role") }}
    {%- endif %}
{%- endfor %}
"""
# No system role; the assistant is called model; contents are trimmed.
NO_SYSTEM = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not \
supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != \
(loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = \
message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""
# A macro, default texts, and whitespace that only trim_blocks and lstrip_blocks remove.
MACRO = """\
{%- macro turn(role, text) -%}
<|{{ role }}|>
{{ text }}<|end|>
{%- endmacro -%}
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
        {{- turn('system', 'You are a helpful assistant.') }}
    {% endif %}
    {{- turn(message['role'], message['content'] | default('', true) | e | replace('&#39;', "'")) }}
{% else %}
nothing was said
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% else %}
{{ eos_token }}
{% endif %}
"""
# Sorting, slicing, filters on attributes, dictionaries, tests and string methods.
FILTERS = """\
{% set roles = messages | map(attribute='role') | unique | list | sort %}
{{ roles | join(',') }} {{ messages | length }} {{ messages[-1].content | upper | truncate(12) }}
{% for role, group in messages | groupby('role') %}
{{ loop.index }}/{{ loop.length }} {{ role.title() }}: {{ group | map(attribute='content') | \
select('string') | map('length') | sum }}
{% endfor %}
{{ {'b': 1, 'a': [true, none, 1.5, 'é<&>']} | tojson }} {{ {'b': 1, 'a': 2} | dictsort }}
{{ 'x' * 3 ~ 7 // 2 ~ 7 % 4 ~ 2 ** 3 }} {{ messages[0].content.split() | first | default('-') }}
{{ (messages | selectattr('role', 'in', ['user', 'tool']) | list)[-1].content is defined }}
{%- if strftime_now is defined %} {{ strftime_now('%Y') | length }}{% endif %}
"""
FAMILIES = {
    "headers": HEADERS,
    "im turns": IM_TURNS,
    "brackets": BRACKETS,
    "no system": NO_SYSTEM,
    "macro": MACRO,
    "filters": FILTERS,
}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Das Wetter \"dort\" & 'hier'",
        "parameters": {"type": "object", "properties": {"ort": {"type": "string", "default": "Ü"}}},
    },
}
_SYSTEM = {"role": "system", "content": " Antworte kurz.\n"}
_QUESTION = {"role": "user", "content": "  Wie heißt <b>'das'</b> & warum? {{ 1 }}\n"}
_ANSWER = {"role": "assistant", "content": " Nun {% raw %} ja.\n"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abc123def",
            "type": "function",
            "function": {"name": "weather", "arguments": {"ort": "Köln", "n": None, "x": [1.0]}},
        }
    ],
}
_RESULT = {"role": "tool", "content": "18 °C", "tool_call_id": "abc123def", "name": "weather"}
_THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nJa."}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [_QUESTION],
    "system": [_SYSTEM, _QUESTION],
    "two turns": [_QUESTION, _ANSWER, _QUESTION],
    "system and two turns": [_SYSTEM, _QUESTION, _ANSWER, _QUESTION],
    "ends with an answer": [_QUESTION, _ANSWER],
    "two questions": [_QUESTION, _QUESTION],
    "call": [_QUESTION, _CALL, _RESULT],
    "two results": [_SYSTEM, _QUESTION, _CALL, _RESULT, _RESULT],
    "thinking": [_QUESTION, _THOUGHT, _QUESTION, {**_ANSWER, "reasoning_content": "so\n"}],
    "nothing": [],
}
