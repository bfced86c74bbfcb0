"""Known templates pass the meter; those that could hold the loop are stopped before they do."""

from __future__ import annotations

import pytest

from lmi_core.errors import UserError
from lmi_core.text.chat import ChatTemplate
from lmi_core.text.metered_template import CostlyTemplateError, metered
from lmi_core.text.template_language import compile_template
from tests.text.chat_templates import CONVERSATIONS, FAMILIES, TOOL

MESSAGES = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Yes?"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% endfor %}",
        "{% for i in range(300) %}{% for j in range(300) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) | map('string') %}{% endfor %}",
        "{{ range(99999) | list }}",
        "{{ range(99999) | sum }}",
        "{{ 'a' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 10000000000 * 'a' }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
        "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
        "{{ range(9999) | join('b' * 99999) }}",
        "{{ lipsum(n=100000) }}",
        "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}",
        "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}",
        "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set s %}"
        "{{ n.s }}{{ n.s }}{% endset %}{% set n.s = s %}{% endfor %}",
        "{% set n = namespace(i=3) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        "{% for i in [[[1]]] recursive %}{{ loop(range(99999)) }}{% endfor %}",
    ],
)
def test_what_could_take_long_is_stopped(source: str) -> None:
    template = ChatTemplate({"default": source})
    with metered(), pytest.raises(CostlyTemplateError):
        template.render(MESSAGES)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"filters"}))
def test_models_templates_pass(family: str, conversation: str) -> None:
    template = ChatTemplate({"default": FAMILIES[family]}, {"bos_token": "<s>"})
    for tools in (None, [TOOL]):
        try:
            expected = template.render(CONVERSATIONS[conversation], tools=tools)
        except UserError as error:
            expected = str(error)
        with metered():
            try:
                text = template.render(CONVERSATIONS[conversation], tools=tools)
            except UserError as error:
                text = str(error)
        assert text == expected


def test_constants_are_not_computed_while_compiling() -> None:
    compile_template("{{ 'a' | center(10000000000) }}{% set x = 'a' | center(10000000000) %}")


def test_long_messages_get_fewer_units() -> None:
    source = "{% for i in range(3000) %}{% endfor %}{{ messages[0].content | length }}"
    template = ChatTemplate({"default": source})
    with metered():
        assert template.render(MESSAGES) == "3"
        with pytest.raises(CostlyTemplateError):
            template.render([{"role": "user", "content": "x" * 60_000}])
    assert template.render([{"role": "user", "content": "x" * 60_000}]) == "60000"


def test_outside_nothing_is_charged() -> None:
    template = ChatTemplate({"default": "{% for i in range(99999) %}{% endfor %}done"})
    assert template.render(MESSAGES) == "done"
